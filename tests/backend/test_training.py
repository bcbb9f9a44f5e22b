"""DDP, replicate() and hybrid sharding, unchanged but for the name of the backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.backend import CompressedProcessGroup, Traffic
from tests.rank_pool import RankPool

WIDTH, STEPS = 192, 6
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def net() -> nn.Sequential:
    """Two matrices of 147 kB; norms and biases that stay exact where they are reduced alone."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def ddp(model: nn.Module, backend: str) -> tuple[nn.Module, Any]:
    return DistributedDataParallel(model, bucket_cap_mb=0.2), dist.group.WORLD


def compiled(model: nn.Module, backend: str) -> tuple[nn.Module, Any]:
    """DDP within the compiled function: in the second step its reducer broadcasts the order of its buckets."""
    wrapped: Any = torch.compile(DistributedDataParallel(model), backend="eager")
    return wrapped, dist.group.WORLD


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
    function.__name__: function for function in (ddp, compiled, composable, sharded, hybrid)
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
    [
        ("ddp", 2),
        ("compiled", 2),
        ("composable", 2),
        ("sharded", 2),
        ("hybrid", 2),
        pytest.param("hybrid", 4, marks=pytest.mark.slow),
    ],
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


def reduced_bytes(policy: dict[str, Any]) -> tuple[Traffic, float]:
    """On a rank: what one backward pass of HSDP compresses, and how far it moves the weights from those over gloo."""
    mesh = {
        name: init_device_mesh(
            "cpu", (2, 1), mesh_dim_names=("replicate", "shard"), backend_override={"replicate": name}
        )
        for name in ("gloo", "bagua:uint8")
    }
    grads = {}
    for name, each in mesh.items():
        model = net()
        fully_shard(model, mesh=each, mp_policy=MixedPrecisionPolicy(**policy))
        model(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))).float().sum().backward()
        grads[name] = [param.grad.full_tensor() for param in model.parameters()]  # pyright: ignore
    group = mesh["bagua:uint8"].get_group("replicate")
    assert isinstance(group, CompressedProcessGroup)
    exact, ours = (torch.cat([grad.flatten() for grad in grads[name]]) for name in mesh)
    return group.traffic, float((ours - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("reduce_dtype", "itemsize"),
    [(None, 4 if TORCH >= (2, 15) else 2), (torch.bfloat16, 2), (torch.float32, 4)],
)
def test_hsdp_of_half_precision_weights(reduce_dtype: torch.dtype | None, itemsize: int, pool: RankPool) -> None:
    """The dtype of FSDP's default changed in torch 2.15; the bytes of the codec do not depend on it."""
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    elements = sum(param.numel() for param in net().parameters())
    for traffic, error in pool.run(2, reduced_bytes, policy, backend="gloo"):
        assert traffic.operations == 1
        assert traffic.bytes_exact == elements * itemsize
        assert elements < traffic.bytes_sent < 1.05 * elements
        assert 0 < error < 0.02


class Counted(nn.Module):
    """A matrix and, as large, a buffer that every rank has for itself and changes in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.randn(WIDTH, WIDTH) + dist.get_rank())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += x.mean()
        return self.inner(x)


def buffers_of_ddp(options: dict[str, Any], hook: bool) -> tuple[Tensor, Tensor]:
    """On a rank: the buffer after DDP's construction, and after two forward passes."""
    torch.manual_seed(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers, from torch 2.15 on
        model = DistributedDataParallel(Counted(), bucket_cap_mb=0.2, **options)
    if hook:
        model.register_comm_hook(None, bagua.interop.ddp_hook("bytegrad"))
    first = model.module.seen.clone()
    for step in range(2):
        model(torch.full((4, WIDTH), float(1 + step + 2 * dist.get_rank()))).sum().backward()
    return first, model.module.seen.clone()


@pytest.mark.parametrize("each_pass", [True, False])
@pytest.mark.parametrize("option", ["broadcast_buffers", "forward_sync_buffers"])
@pytest.mark.parametrize("hook", [False, True], ids=["backend", "hook"])
def test_buffers_are_ddps_own_bit_by_bit(hook: bool, option: str, each_pass: bool, pool: RankPool) -> None:
    if option not in signature(DistributedDataParallel.__init__).parameters:
        pytest.skip(f"{option}: from torch 2.15 on")
    options = {option: each_pass}
    found = pool.run(2, buffers_of_ddp, options, hook, backend="gloo" if hook else "bagua:uint8")
    exact = pool.run(2, buffers_of_ddp, options, False, backend="gloo")
    for mine, theirs in zip(found, exact, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    (first, last), (others_first, others_last) = found
    if option == "forward_sync_buffers" or each_pass:
        assert torch.equal(first, others_first)
    assert not torch.equal(last, others_last)  # each rank has added the mean of its own batch
    if each_pass:
        torch.testing.assert_close(others_last - last, torch.full_like(last, 2.0))
