"""The facade's `DistributedDataParallel` beside torch's, and the all-reduce that autograd knows."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from tests.rank_pool import RankPool


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh()) * scale


def _batch(step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _equals_torch(options: dict[str, Any]) -> None:
    from bagua.torch_api.data_parallel import DistributedDataParallel

    torch.manual_seed(dist.get_rank())
    inner = _Net()
    reference = nn.parallel.DistributedDataParallel(copy.deepcopy(inner), find_unused_parameters=True)
    model = DistributedDataParallel(inner, find_unused_parameters=True, **options)
    pair = (model, reference)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in pair]
    for step in range(3):
        for each, optimizer in zip(pair, optimizers, strict=True):
            if step:
                optimizer.step()
            optimizer.zero_grad()
            with each.no_sync():
                assert not each.require_backward_grad_sync
                each(_batch(step)).square().sum().backward()
            assert each.require_backward_grad_sync
            each(_batch(step + 10), scale=0.5).square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert name.startswith("module.")
        assert torch.allclose(mine, theirs, atol=1e-6), name
        if name.startswith("module.unused"):
            assert mine.grad is None or not mine.grad.any()
        else:
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.allclose(mine.grad, theirs.grad, atol=1e-5), name
    assert list(model.state_dict()) == list(reference.state_dict())
    model.load_state_dict(reference.state_dict())


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0001}])
def test_gradients_equal_torch(pool: RankPool, options: dict[str, Any]) -> None:
    pool.run(2, _equals_torch, options)


def _buffers() -> list[bool]:
    from bagua.torch_api.data_parallel import DistributedDataParallel

    same = []
    for broadcast in (True, False):
        model = DistributedDataParallel(_Net(), broadcast_buffers=broadcast)
        for step in range(2):
            model(_batch(step)).sum().backward()
        with model.no_sync():
            model(_batch(5)).sum().backward()  # nothing is broadcast here
        seen: list[torch.Tensor] = []
        handle = model.module.norm.register_forward_pre_hook(
            lambda norm, _args, seen=seen: seen.append(norm.running_mean.clone())
        )
        model(_batch(6)).sum().backward()
        handle.remove()
        others = [torch.empty(8) for _ in range(dist.get_world_size())]
        dist.all_gather(others, seen[0])
        same.append(all(torch.equal(other, others[0]) for other in others))
        model.eval()
        if dist.get_rank() == 0:
            model(_batch(0))  # alone
    return same


def test_buffers_are_broadcast_before_a_forward_pass(pool: RankPool) -> None:
    assert pool.run(2, _buffers) == [[True, False]] * 2


def _interface() -> list[str]:
    import bagua.torch_api as api
    from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm
    from bagua.torch_api.data_parallel import DistributedDataParallel

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bagua").addHandler(handler)
    net = _Net()
    net._ddp_params_and_buffers_to_ignore = ["unused.weight"]
    optimizer = torch.optim.Adam(net.parameters())
    algorithm = ByteGradAlgorithm(hierarchical=False)
    model = DistributedDataParallel(
        net,
        process_group=api.new_group(),
        bucket_cap_mb=1,
        check_reduction=True,
        gradient_as_bucket_view=False,
        optimizers=[optimizer],
        algorithm=algorithm,
    )
    logging.getLogger("bagua").removeHandler(handler)
    assert model.module is net
    assert model.inner is net
    assert model.parameters_to_ignore == {"unused.weight"}
    assert model.bagua_algorithm is algorithm
    assert model.bagua_optimizers == [optimizer]
    assert "ByteGrad" in bagua.stats(net).algorithm
    model.bagua_module_name = "net"
    assert model.bagua_module_name == net.bagua_module_name == "net"
    model(_batch(0)).sum().backward()
    assert len(model.bagua_buckets) == 1
    kept = net.first.weight.grad
    model.zero_grad()
    model(_batch(1)).sum().backward()
    assert kept is not None and net.first.weight.grad is not kept  # gradient_as_bucket_view=False
    for name in ("join", "scatter", "gather", "register_comm_hook"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(model, name)()
    plain = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(plain(_batch(1)), copy.deepcopy(net)(_batch(1)))
    for bad, error, match in (
        ({"dim": 1}, ValueError, "dim: expected 0"),
        ({"device_ids": [0, 1]}, ValueError, "device_ids: expected the one device"),
        (
            {"device_ids": [0]},
            ValueError,
            r"device_ids: is \[cuda:0\], but parameter 'first.weight' is on cpu",
        ),
        ({"output_device": 0}, ValueError, "output_device: needs device_ids"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb: expected a positive"),
        ({"bucket_cap_mb": "1"}, TypeError, "bucket_cap_mb: expected a number"),
        ({"process_group": "x"}, TypeError, "group: expected"),
        ({"algorithm": "x"}, ValueError, "'x' is unknown"),
    ):
        with pytest.raises(error, match=match):
            DistributedDataParallel(_Net(), **bad)
    with pytest.raises(TypeError, match="module: expected"):
        DistributedDataParallel("net")  # type: ignore[arg-type]
    return said


def test_arguments_act_or_are_refused_or_reported(pool: RankPool) -> None:
    [said] = pool.run(1, _interface)
    assert [line.split(" has no effect")[0] for line in said] == ["DistributedDataParallel: check_reduction"]


def _bucket_caps() -> list[int]:
    from bagua.torch_api.data_parallel import DistributedDataParallel

    counts = []
    for cap in (None, 1, 0.0001):
        model = DistributedDataParallel(
            nn.Sequential(*[nn.Linear(300, 300, bias=False) for _ in range(6)]), bucket_cap_mb=cap
        )
        model(torch.ones(2, 300)).sum().backward()
        counts.append(bagua.stats(model.module).num_buckets)
    return counts


def test_bucket_cap_is_honoured(pool: RankPool) -> None:
    """Six layers of 360 kB. With the default the first bucket is small, as with DDP."""
    assert pool.run(2, _bucket_caps) == [[2, 2, 6]] * 2


def _functional() -> None:
    import bagua.torch_api as api
    from bagua.torch_api.data_parallel import functional

    n, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group([0, 1])
    for op, forward, backward in (
        (dist.ReduceOp.SUM, n * (n + 1) / 2, n * (n + 1) / 2),
        (api.ReduceOp.AVG, (n + 1) / 2, (n + 1) / 2),
        (dist.ReduceOp.MAX, n, n),
    ):
        x = torch.full((2, 2), rank + 1.0, requires_grad=True)
        y = functional.all_reduce(x.t(), op)
        assert y.tolist() == [[forward] * 2] * 2
        assert x.tolist() == [[rank + 1.0] * 2] * 2
        (y * (rank + 1)).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[backward] * 2] * 2
    x = torch.ones(1, requires_grad=True)
    for _ in range(2):
        y = functional.all_reduce(x, group=group)
        assert y.item() == (2 if rank < 2 else 1)
    assert functional.all_reduce(x, group=api.new_group([n - 1])).item() == 1
    # The gradient of a gradient is reduced too: d/dx of (sum over ranks of 2 y) times y
    y = functional.all_reduce(x)
    (slope,) = torch.autograd.grad(y.square(), x, create_graph=True)
    assert slope.item() == 2 * n * n
    (curvature,) = torch.autograd.grad(slope, x)
    assert curvature.item() == 2 * n * n
    with pytest.raises(ValueError, match="op: expected SUM, AVG or MAX, got PRODUCT"):
        functional.all_reduce(x, dist.ReduceOp.PRODUCT)
    with pytest.raises(TypeError, match="tensor: expected"):
        functional.all_reduce(3.0)  # type: ignore[arg-type]


def test_all_reduce_both_ways(pool: RankPool) -> None:
    pool.run(3, _functional)
