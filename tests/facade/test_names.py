"""Names of the original: those that pytorch_lightning 1.9.5 and scripts for Bagua 0.9 import and read."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from tests.rank_pool import RankPool

# What pytorch_lightning 1.9.5 imports when it finds this package installed, whether or not Bagua is then used.
LIGHTNING = {
    "bagua.torch_api": ["init_process_group"],
    "bagua.torch_api.algorithms": ["Algorithm"],
    "bagua.torch_api.algorithms.q_adam": ["QAdamOptimizer"],
    "bagua.torch_api.communication": [
        "ReduceOp",
        "allreduce_inplace",
        "barrier",
        "broadcast_object",
        "is_initialized",
    ],
    "bagua.torch_api.data_parallel.distributed": ["DistributedDataParallel_V1_9_0"],
}


@pytest.mark.parametrize("module", LIGHTNING)
def test_pytorch_lightning_1_9_finds_its_names(module: str) -> None:
    assert all(hasattr(import_module(module), name) for name in LIGHTNING[module])


def test_reductions_are_named_as_pytorch_lightning_1_9_reads_them() -> None:
    from bagua.torch_api.communication import ReduceOp

    names = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
    assert [int(getattr(ReduceOp, name)) for name in names] == [0, 1, 2, 3, 8, 7, 9, 10]


@pytest.mark.process
def test_one_import_is_enough() -> None:
    """In a process of its own: a test before may have imported the packages. They cost nothing until they are used."""
    code = """
import sys
import bagua.torch_api as bagua
import torch
assert not {"bagua.data", "bagua.torch_api.contrib"} & set(sys.modules)
optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
bagua.contrib.fuse_optimizer(optimizer).fuse_step()
assert bagua.checkpoint.save_checkpoint and bagua.checkpoint.load_checkpoint
assert bagua.contrib.CachedDataset and bagua.contrib.LoadBalancingDistributedSampler
assert bagua.version == torch.__version__
try:
    bagua.get_backend("some")
except NotImplementedError as error:
    assert "bagua.stats" in str(error)
else:
    raise AssertionError("get_backend returned")
assert not hasattr(bagua, "nothing")
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "done\n", done.stderr


def _as_lightning_does() -> list[torch.Tensor]:
    """Wrap by the old name, with keywords; accumulate as manual optimisation does; pause and resume."""
    from bagua.torch_api.algorithms import Algorithm
    from bagua.torch_api.data_parallel.distributed import DistributedDataParallel_V1_9_0, to_bagua_process_group

    torch.manual_seed(int(torch.distributed.get_rank()))
    module = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = DistributedDataParallel_V1_9_0(
        module=module,
        optimizers=[optimizer],
        algorithm=Algorithm.init("gradient_allreduce"),
        gradient_as_bucket_view=True,
    )
    assert isinstance(model, DistributedDataParallel_V1_9_0)
    assert to_bagua_process_group(model.process_group) is model.process_group
    assert to_bagua_process_group(torch.distributed.group.WORLD).ranks == to_bagua_process_group().ranks == [0, 1]
    inner: Any = model.inner
    for step in range(4):
        inner.require_backward_grad_sync = step % 2 == 1
        model(torch.full((2, 3), float(torch.distributed.get_rank()))).sum().backward()
        inner.require_backward_grad_sync = True
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def test_the_wrapper_goes_by_its_old_name(pool: RankPool) -> None:
    first, second = pool.run(2, _as_lightning_does)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
