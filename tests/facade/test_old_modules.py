"""Modules of the original that scripts import: what they hold works, or says what to do instead."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from tests.rank_pool import RankPool

# Public names by module; `Gone` ones are in GONE.
NAMES = {
    "bagua.version": "__version__",
    "bagua.bagua_define": "TensorDtype TensorDeclaration BaguaHyperparameter BaguaCoreTelemetrySpan "
    "get_tensor_declaration_bytes",
    "bagua.torch_api.bucket": "BaguaBucket",
    "bagua.torch_api.distributed": "BaguaModule",
    "bagua.torch_api.tensor": "BaguaTensor",
    "bagua.torch_api.algorithms.gradient_allreduce": "GradientAllReduceAlgorithmImpl",
    "bagua.torch_api.algorithms.bytegrad": "ByteGradAlgorithmImpl",
    "bagua.torch_api.algorithms": "Algorithm AlgorithmImpl GlobalAlgorithmRegistry",
    "bagua.torch_api.data_parallel.bagua_distributed": "BaguaDistributedDataParallel",
    "bagua.torch_api.communication": "comm CommMember ReduceOp _rank_not_in_comm _rank_not_in_group",
    "bagua.torch_api.data_parallel.functional": "ReduceOp torch_reduce_op_to_bagua all_reduce",
    "bagua.torch_api.utils": "flatten unflatten apply_flattened_call apply_flattened_call_all check_contiguous "
    "get_flattened_tensor to_bagua_datatype average_by_removing_extreme_values StatisticalAverage",
    "bagua.torch_api.env": "get_world_size get_rank get_local_rank get_local_size get_node_rank "
    "get_default_bucket_size "
    "get_master_addr get_bagua_service_port is_report_metrics_switch_on get_autotune_level get_autotune_max_samples "
    "get_autotune_sampling_confidence_time_s get_autotune_warmup_time_s get_is_output_autotune_log "
    "get_autotune_server_wait_time find_free_network_port _is_elastic_launched",
    "bagua.torch_api.contrib.sync_batchnorm": "SyncBatchNorm",
    "bagua.torch_api.contrib.utils.store": "Store ClusterStore",
    "bagua.torch_api.contrib.utils.redis_store": "RedisStore",
    "bagua.torch_api.contrib.fuse.optimizer": "fuse_optimizer fuse_step is_fused_optimizer calculate_mutual_groups",
}
GONE = {
    "bagua.service": ("AutotuneService AutotuneClient", "autotune=True"),
    "bagua.service.autotune_service": ("AutotuneService AutotuneClient AutotuneServiceTaskManager", "autotune=True"),
    "bagua.service.autotune_task_manager": ("AutotuneTaskManager", "autotune=True"),
    "bagua.service.bayesian_optimizer": ("IntParam FloatParam BoolParam BayesianOptimizer", "autotune=True"),
    "bagua.service.autotune_system": ("sysperf autotune_system_hyperparameters", "bagua bench net"),
    "bagua.torch_api.communication": ("get_communicator", "get_global_communicator"),
    "bagua.torch_api.algorithms.decentralized": (
        "DecentralizedAlgorithmImpl LowPrecisionDecentralizedAlgorithmImpl",
        "AlgorithmImpl",
    ),
    "bagua.torch_api.algorithms.q_adam": ("QAdamAlgorithmImpl", "AlgorithmImpl"),
    "bagua.torch_api.algorithms.async_model_average": ("AsyncModelAverageAlgorithmImpl", "AlgorithmImpl"),
    "bagua.torch_api.contrib.utils.redis_store": ("start_redis_server_cli", "RedisStore"),
}


@pytest.mark.parametrize("module", NAMES)
def test_modules_hold_the_names_of_the_original(module: str) -> None:
    missing = [name for name in NAMES[module].split() if not hasattr(import_module(module), name)]
    assert not missing


@pytest.mark.parametrize("module", GONE)
def test_what_is_gone_says_what_to_do(module: str) -> None:
    names, instead = GONE[module]
    for name in names.split():
        stand_in: Any = getattr(import_module(module), name)
        with pytest.raises(NotImplementedError, match=name) as error:
            stand_in("an argument", keyword=1)
        assert instead in str(error.value)
        with pytest.raises(AttributeError, match=name) as error:
            stand_in.attribute  # noqa: B018
        assert instead in str(error.value)
        with pytest.raises(TypeError, match=name):
            exec("class Own(stand_in): pass", {"stand_in": stand_in})


def test_the_version_is_that_of_the_package() -> None:
    assert import_module("bagua.version").__version__ == bagua.__version__


def _members() -> dict[str, Any]:
    """On a rank: everything as a method of the communicator, beside the function; buckets to look at."""
    import bagua.torch_api as facade
    from bagua.torch_api.bucket import BaguaBucket
    from bagua.torch_api.communication import CommMember, ReduceOp, comm, get_communicator  # noqa: F401

    rank = facade.get_rank()
    world: Any = facade.communication._get_default_group().get_global_communicator()
    mine = torch.arange(4.0) + 10 * rank
    seen: dict[str, Any] = {}
    total, everything, swapped = mine.clone(), torch.zeros(8), torch.zeros(4)
    world.allreduce_inplace(total, ReduceOp.SUM)
    world.allgather(mine, everything)
    world.alltoall(mine, swapped)
    other = mine.clone()
    facade.allreduce_inplace(other, comm=CommMember.WORLD)
    facade.broadcast(other, 0, comm=comm.WORLD)
    seen |= {"total": total, "everything": everything, "other": other}
    with pytest.raises(AttributeError, match="no_such_call"):
        world.no_such_call  # noqa: B018

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

    module: Any = model
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    model(torch.ones(1, 3)).sum().backward()
    bucket: Any = module.bagua_buckets[0]
    assert (
        len(module.bagua_buckets) == 1
        and isinstance(module.bagua_buckets[0], BaguaBucket)
        and bucket.name == "bucket_0"
        and bucket.check_flatten()
    )
    assert bucket.bytes() == 32 and {id(each) for each in bucket.tensors} == {id(each) for each in model.parameters()}
    assert torch.equal(bucket.flattened_tensor(), bucket.flat) and bucket.flattened_tensor() is not bucket.flat
    for refused in (bucket.append_python_op, bucket.append_centralized_synchronous_op, bucket.clear_ops):
        with pytest.raises(NotImplementedError, match="bagua.Algorithm"):
            refused()
    return seen


def test_communicators_have_the_primitives_and_modules_their_buckets(pool: RankPool) -> None:
    for seen in pool.run(2, _members):
        assert seen["total"].tolist() == seen["other"].tolist() == [10.0, 12.0, 14.0, 16.0]
        assert seen["everything"].tolist() == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]


def test_the_registry_is_a_dict() -> None:
    from bagua.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry
    from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm

    assert isinstance(GlobalAlgorithmRegistry, dict)
    assert "bytegrad" in GlobalAlgorithmRegistry and "nope" not in GlobalAlgorithmRegistry
    assert list(GlobalAlgorithmRegistry) == GlobalAlgorithmRegistry.available_algorithms()
    assert (
        GlobalAlgorithmRegistry["bytegrad"]["algorithm"] is GlobalAlgorithmRegistry.get("bytegrad") is ByteGradAlgorithm
    )
    assert "bytegrad" in str(GlobalAlgorithmRegistry)
    for unknown in (lambda: GlobalAlgorithmRegistry.get("nope"), lambda: Algorithm.init("nope")):
        with pytest.raises(KeyError) as error:
            unknown()
        assert "'nope' is unknown; available: " in str(error.value) and isinstance(error.value, ValueError)


def test_algorithms_hold_what_they_were_given() -> None:
    from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm

    one = DecentralizedAlgorithm(hierarchical=False, peer_selection_mode="shift_one", communication_interval=3)
    assert (one.hierarchical, one.peer_selection_mode, one.communication_interval) == (False, "shift_one", 3)
    two = LowPrecisionDecentralizedAlgorithm(communication_interval=2)
    assert (two.hierarchical, two.communication_interval) == (True, 2)
