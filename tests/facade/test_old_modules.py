"""Modules of the original that scripts import: what they hold works, or says what to do instead."""

from __future__ import annotations

import argparse
import datetime
import enum
import types
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import bagua
from tests.docs.markdown import ROOT
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


def test_descriptions_of_tensors() -> None:
    from bagua.bagua_define import BaguaHyperparameter, TensorDtype, get_tensor_declaration_bytes

    sizes = [get_tensor_declaration_bytes({"name": "w", "num_elements": 10, "dtype": dtype}) for dtype in TensorDtype]
    assert sizes == [40, 20, 10] and TensorDtype.F16 == "f16"
    chosen = BaguaHyperparameter().update({"bucket_size": 5, "no field": 1})
    assert chosen.dict() == {"buckets": [], "bucket_size": 5, "is_hierarchical_reduce": False}
    assert BaguaHyperparameter().buckets is not chosen.buckets


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from bagua.torch_api import env

    names = "MASTER_ADDR BAGUA_SERVICE_PORT BAGUA_REPORT_METRICS BAGUA_AUTOTUNE BAGUA_AUTOTUNE_MAX_SAMPLES "
    names += "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S BAGUA_AUTOTUNE_WARMUP_TIME_S BAGUA_IS_OUTPUT_AUTOTUNE_LOG "
    names += "BAGUA_AUTOTUNE_SERVER_WAIT_TIME RANK GROUP_RANK LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    assert (env.get_master_addr(), env.get_bagua_service_port(), env.is_report_metrics_switch_on()) == (
        "127.0.0.1",
        -1,
        False,
    )
    assert (env.get_autotune_level(), env.get_autotune_max_samples()) == (0, 60)
    assert (env.get_autotune_sampling_confidence_time_s(), env.get_autotune_warmup_time_s()) == (5.0, 30.0)
    assert (env.get_is_output_autotune_log(), env.get_autotune_server_wait_time()) == (False, 300)
    assert (env._is_elastic_launched(), env.get_node_rank()) == (False, 0)
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0")
    assert not env.get_is_output_autotune_log(), "the original took the text 0 for true"
    monkeypatch.setenv("BAGUA_AUTOTUNE_WARMUP_TIME_S", "soon")
    with pytest.raises(ValueError, match="BAGUA_AUTOTUNE_WARMUP_TIME_S.*soon"):
        env.get_autotune_warmup_time_s()
    monkeypatch.setenv("NODE_RANK", "3")
    assert env.get_node_rank() == 3
    for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert env._is_elastic_launched() and env.get_node_rank() == 1
    assert 0 < env.find_free_network_port() < 65536


def test_flat_tensors() -> None:
    from bagua.torch_api import utils

    whole = torch.arange(10.0)
    parts = [whole[:4], whole[4:6].view(2, 1), whole[6:]]
    assert utils.check_contiguous(parts) and not utils.check_contiguous(parts[::-1])
    assert torch.equal(utils.flatten(parts), whole)
    copied = utils.get_flattened_tensor(parts)
    assert copied is not None and torch.equal(copied, whole) and copied.data_ptr() != whole.data_ptr()
    assert utils.get_flattened_tensor([]) is None
    apart = [torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(2)]
    utils.apply_flattened_call_all(apart, lambda flat: flat.mul_(len(flat)))
    assert [each.tolist() for each in apart] == [[5.0] * 3, [2] * 2, [5.0] * 2]
    assert [utils.to_bagua_datatype(d) for d in (torch.float32, torch.float16, torch.uint8, torch.long)] == [
        "f32",
        "f16",
        "u8",
        "i64",
    ]
    with pytest.raises(ValueError, match="bfloat16"):
        utils.to_bagua_datatype(torch.bfloat16)


def test_scores_without_what_is_far_off() -> None:
    from bagua.torch_api.utils import average_by_removing_extreme_values

    mean, deviation, kept = average_by_removing_extreme_values([900.0, 900.0, 900.0, 1.0, 2.0, 3.0, 2.0, 2.0, 50.0])
    assert kept == [1.0, 2.0, 3.0, 2.0, 2.0] and mean == 2.0 and 0.6 < deviation < 0.7
    assert average_by_removing_extreme_values([4.0]) == (4.0, 0.0, [4.0])


def test_a_mean_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from bagua.torch_api import statistical_average, utils

    now = [1000.0]
    monkeypatch.setattr(statistical_average.time, "time", lambda: now[0])
    # 5 for a second, then back in time: 4 for one, 2.5 for two, and 0.5 for two more.
    means = utils.StatisticalAverage(1000.0, [5.0, 4.5, 3.5], (2.0, 2.5))
    now[0] += 1
    means.record(6.0)
    assert [means.get_records_mean(n) for n in (1.0, 2.0, 3.0, 5.0, 7.0)] == pytest.approx(
        [6.0, 11 / 2, (6 + 4.5 * 2) / 3, (6 + 3.5 * 4) / 5, (6 + 2.5 * 6) / 7]
    )
    assert means.total_recording_time() == pytest.approx(7.0)
    now[0] += 2
    assert means.get(1.0) == 6.0 and means.get(4.0) == pytest.approx(11 / 2)
    assert utils.StatisticalAverage().get(5.0) == 0.0


def test_stores() -> None:
    from bagua.torch_api.contrib.utils.store import ClusterStore, Store

    class Own(Store):
        def __init__(self) -> None:
            self.kept: dict[str, Any] = {}

        def set(self, key: str, value: Any) -> None:
            self.kept[key] = value

        def get(self, key: str) -> Any:
            return self.kept.get(key)

        def num_keys(self) -> int:
            return len(self.kept)

        def clear(self) -> None:
            self.kept.clear()

    parts = [Own(), Own(), Own()]
    store = ClusterStore(parts)
    store.set("1", b"one")
    store.mset({str(n): str(n).encode() for n in range(2, 40)})
    assert store.get("1") == b"one" and store.mget(["2", "none", "3", "2"]) == [b"2", None, b"3", b"2"]
    assert store.num_keys() == 39 and all(part.num_keys() > 3 for part in parts) and store.status()
    store.clear()
    assert store.num_keys() == 0
    with pytest.raises(ValueError, match="stores"):
        ClusterStore([])


def test_groups_of_neighbours() -> None:
    from bagua.torch_api.contrib.fuse.optimizer import calculate_mutual_groups

    pieces = torch.rand(100).split(10)
    first = [pieces[3], pieces[1], pieces[2], pieces[0], pieces[8], pieces[9], torch.rand(10)]
    alone = [torch.rand(10) for _ in first]
    assert calculate_mutual_groups([first, alone]) == []
    assert calculate_mutual_groups([first, [*first[:4], *alone[4:]]]) == [[3, 1, 2, 0]]
    assert calculate_mutual_groups([first, [alone[0], *first[1:]]]) == [[4, 5]]
    assert calculate_mutual_groups([first, list(first)]) == [[3, 1, 2, 0], [4, 5]]
    with pytest.raises(ValueError, match="7, 6"):
        calculate_mutual_groups([first, first[1:]])


def test_samplers_show_their_chunks() -> None:
    from bagua.torch_api.contrib import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

    samplers = [
        LoadBalancingDistributedSampler(range(10), lambda n: n, num_replicas=2, rank=rank, seed=3) for rank in range(2)
    ]
    chunks, order = samplers[0].shuffle_chunks()
    assert all(list(sampler) == [chunks[at][rank] for at in order] for rank, sampler in enumerate(samplers))
    assert (chunks, order) == samplers[1].shuffle_chunks()
    batches = LoadBalancingDistributedBatchSampler(samplers[0], lambda samples: [samples[:2], samples[2:]])
    batches.generate_batches()
    assert [sample for batch in batches for sample in batch] == list(samplers[0])


def test_the_store_of_a_loader() -> None:
    from bagua.torch_api.contrib import CachedDataset, CacheLoader

    loader = CacheLoader(backend="memory", dataset_name="the store of a loader")
    dataset = CachedDataset(["a", "b", "c"], backend="memory", dataset_name="another")
    assert loader.get("key", lambda _: 5) == 5 and dataset[1] == "b"
    dataset.flush()
    loader.flush()
    store: Any = vars(dataset)["cache_loader"].store
    assert isinstance(dataset.cache_loader.num_keys(), int) and store.num_keys() == dataset.cache_loader.num_keys() > 0
    assert store.status()
    store.clear()
    assert store.num_keys() == 0
    for each in (store, loader.store):
        each.shutdown()


def test_the_step_of_a_fused_optimizer_as_a_function() -> None:
    from bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer, fuse_step

    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with pytest.raises(ValueError, match="fuse_optimizer"):
        fuse_step(optimizer)
    weight.grad = torch.ones(3)
    assert fuse_step(fuse_optimizer(optimizer), lambda: 7.0) == 7.0
    assert torch.equal(weight.detach(), torch.full((3,), 0.5))


def test_names_of_lightning() -> None:
    pytest.importorskip("lightning")
    from lightning_bagua.environment import BaguaEnvironment
    from lightning_bagua.strategy import LightningBaguaModule

    with pytest.raises(NotImplementedError, match="LightningBaguaModule"):
        LightningBaguaModule(nn.Linear(1, 1))
    assert BaguaEnvironment().creates_processes_externally


def test_the_environment_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    from lightning_bagua.environment import BaguaEnvironment

    values = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2345", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    monkeypatch.delenv("GROUP_RANK", raising=False)
    for name, value in {**values, "NODE_RANK": "1", "BAGUA_SERVICE_PORT": "99"}.items():
        monkeypatch.setenv(name, value)
    found = BaguaEnvironment()
    assert BaguaEnvironment.detect() and found.service_port == 99
    assert (found.main_address, found.main_port, found.world_size()) == ("10.0.0.1", 2345, 4)
    assert (found.global_rank(), found.local_rank(), found.node_rank()) == (3, 1, 1)


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


def test_variables_without_effect_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bagua.torch_api import report
    from bagua.torch_api.old_variables import OLD_VARIABLES, report_old_variables

    monkeypatch.setattr(report, "_said", set())
    for name in OLD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"BAGUA_SERVICE_PORT": "-1", "BAGUA_REPORT_METRICS": "0"}.items():
        monkeypatch.setenv(name, value)
    report_old_variables()
    assert not caplog.messages
    for name in OLD_VARIABLES:
        monkeypatch.setenv(name, "8")
    report_old_variables()
    report_old_variables()
    assert sorted(message.split(":")[0] for message in caplog.messages) == sorted(OLD_VARIABLES)
    assert any("BAGUA_NET_FLOWS" in message for message in caplog.messages)
    page = (ROOT / "docs" / "from-bagua.md").read_text()
    assert all(f"`{name}`" in page for name in OLD_VARIABLES), "the page names them"


class Point(NamedTuple):
    x: Any
    y: Any = 0


class Color(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    HIGH = 3


class Sides(enum.Flag):
    LEFT = 1
    RIGHT = 2


UTC = datetime.timezone.utc
KNOWN = {
    "namespace": argparse.Namespace(lr=0.1, shape=(2, 3), nested=types.SimpleNamespace(a=torch.float16)),
    "named": [Point(1, Point("a", b"b"))],
    "members": (Color.RED, Level.HIGH, Sides.RIGHT),
    "torch": [torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
    "times": [
        datetime.date(2024, 2, 29),
        datetime.time(1, 2, 3, 4),
        datetime.datetime(2024, 2, 29, 1, tzinfo=UTC),
        datetime.timedelta(days=-1, microseconds=5),
    ],
    Color.RED: Level.HIGH,
}


def test_objects_of_known_classes_go_and_come_back() -> None:
    from bagua.comm.objects import pack, unpack

    back = unpack(pack(KNOWN))
    assert back == KNOWN and repr(back) == repr(KNOWN)
    assert type(back["named"][0]) is Point and type(back["members"][1]) is Level


@pytest.mark.parametrize(
    "bad",
    [Sides.LEFT | Sides.RIGHT, Point(1, object()), type("Local", (), {})(), Color, UTC],
)
def test_other_objects_are_refused(bad: Any) -> None:
    from bagua.comm.objects import pack

    with pytest.raises(TypeError, match=r"obj.*cannot be sent; supported types: .*named tuples"):
        pack({"a": bad})


def test_a_peer_cannot_name_what_is_run() -> None:
    """Classes are looked up among imported modules, are not called, and must be what was said."""
    import json

    from bagua.comm.objects import unpack

    def message(outline: Any) -> bytes:
        text = json.dumps(outline).encode()
        return len(text).to_bytes(8, "little") + text

    here = __name__
    bad = [
        {"namedtuple": ["subprocess", "Popen", ["args"], ["true"]]},
        {"namedtuple": ["antigravity", "Popen", [], []]},
        {"namedtuple": [here, "Point", ["x"], [1]]},
        {"namedtuple": [here, "Point", ["x", "y"], [1]]},
        {"enum": ["os", "system", "true"]},
        {"enum": [here, "Color", "__class__"]},
        {"enum": [here, "Color.RED", "name"]},
        {"dtype": "load"},
        {"device": ["nonsense", 0]},
        {"reduce": ["os", "system"]},
    ]
    for outline in bad:
        with pytest.raises(ValueError):
            unpack(message(outline))
    import sys

    assert "antigravity" not in sys.modules
