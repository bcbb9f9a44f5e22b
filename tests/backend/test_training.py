"""DDP, replicate() and hybrid sharding, unchanged but for the name of the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bagua.backend import CompressedProcessGroup, Traffic
from tests.rank_pool import RankPool

WIDTH, STEPS = 192, 6


def net() -> nn.Sequential:
    """Two matrices of 147 kB; norms and biases that stay exact where they are reduced alone."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def ddp(model: nn.Module, backend: str) -> tuple[nn.Module, Any]:
    return DistributedDataParallel(model, bucket_cap_mb=0.2), dist.group.WORLD


def composable(model: nn.Module, backend: str) -> tuple[nn.Module, Any]:
    return replicate(model, bucket_cap_mb=0.2), dist.group.WORLD


def sharded(model: nn.Module, backend: str) -> tuple[nn.Module, Any]:
    """fully_shard over one dimension: its reduce-scatter is what is compressed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert isinstance(model, nn.Sequential)
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, mesh.get_group()


def hybrid(model: nn.Module, backend: str) -> tuple[nn.Module, Any]:
    """Native HSDP: only the mesh says which backend carries the replicate dimension."""
    mesh = init_device_mesh(
        "cpu",
        (2, dist.get_world_size() // 2),
        mesh_dim_names=("replicate", "shard"),
        backend_override={"replicate": backend},
    )
    assert isinstance(model, nn.Sequential)
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, mesh.get_group("replicate")


WRAPPERS: dict[str, Callable[[nn.Module, str], tuple[nn.Module, Any]]] = {
    function.__name__: function for function in (ddp, composable, sharded, hybrid)
}


def train(wrapper: str, backend: str) -> tuple[list[float], list[Tensor], Traffic | None]:
    """On a rank: losses of the ranks together, weights of the end, what was compressed."""
    model, group = WRAPPERS[wrapper](net(), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    teacher = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99)) / WIDTH**0.5
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, WIDTH, generator=data)
        loss = (model(x) - x @ teacher).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG)  # a metric: exact
        losses.append(float(total))
    if isinstance(model, FSDPModule):
        weights = [param.full_tensor().detach() for param in model.parameters()]  # pyright: ignore
    else:
        weights = [param.detach().clone() for param in model.parameters()]
    return losses, weights, group.traffic if isinstance(group, CompressedProcessGroup) else None


def differences(mine: list[Tensor], others: list[Tensor]) -> float:
    apart = torch.cat([(a - b).flatten() for a, b in zip(mine, others, strict=True)])
    moved = torch.cat(
        [(b - a).flatten() for a, b in zip(net().requires_grad_(False).parameters(), others, strict=True)]
    )
    return float(apart.norm() / moved.norm())


@pytest.mark.parametrize(
    ("wrapper", "size"),
    [("ddp", 2), ("composable", 2), ("sharded", 2), ("hybrid", 2), pytest.param("hybrid", 4, marks=pytest.mark.slow)],
)
def test_they_learn_as_over_gloo(wrapper: str, size: int, pool: RankPool) -> None:
    default = {"hybrid": "gloo"}.get(wrapper, "bagua:uint8")
    exact = pool.run(size, train, wrapper, "gloo", backend="gloo")
    found = pool.run(size, train, wrapper, "bagua:uint8", backend=default)
    for (losses, weights, traffic), (want, theirs, none) in zip(found, exact, strict=True):
        assert none is None and traffic is not None
        # LayerNorm's parameters, alone or in a bucket, are less than 64 KiB.
        assert traffic.operations in (STEPS, 2 * STEPS)
        assert traffic.bytes_exact / traffic.bytes_sent >= 3.9
        assert losses == pytest.approx(want, rel=0.02)
        assert losses[-1] < losses[0]
        assert differences(weights, theirs) < 0.1
        if wrapper != "sharded":
            assert all(torch.equal(a, b) for a, b in zip(weights, found[0][1], strict=True))
