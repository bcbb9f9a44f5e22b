"""Synchronised batch norm equals batch norm of the joined batch: outputs, gradients and running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from bagua.nn import SyncBatchNorm
from tests.rank_pool import RankPool

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "2d input": {"rows": (4, 4, 4), "shape": (5,)},
    "3d input": {"rows": (2, 2, 2), "shape": (5, 7)},
    "4d input, channels last": {"rows": (2, 2, 2), "shape": (5, 3, 4), "channels_last": True},
    "batches of other sizes": {"rows": (1, 6, 3), "shape": (5, 2)},
    "an empty batch": {"rows": (4, 0, 3), "shape": (5,)},
    "one row on each rank": {"rows": (1, 1, 1), "shape": (5,)},
    "no weight": {"rows": (3, 4, 5), "shape": (5,), "options": {"affine": False}},
    "no running statistics": {"rows": (3, 4, 5), "shape": (5,), "options": {"track_running_stats": False}},
    "cumulative average": {"rows": (3, 4, 5), "shape": (5,), "options": {"momentum": None}},
    "fp64, far from zero": {"rows": (3, 4, 5), "shape": (5,), "dtype": torch.float64, "offset": 1e6},
    "fp32, far from zero": {"rows": (30, 40, 50), "shape": (5,), "offset": 1e4, "atol": 2e-2},
    "bf16 input": {"rows": (3, 4, 5), "shape": (5,), "input": torch.bfloat16, "atol": 5e-2},
}


def data(case: Case, step: int) -> Tensor:
    """The joined batch."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(sum(case["rows"]), *case["shape"], generator=made, dtype=case.get("dtype", torch.float32))
    x = (x * 2 + case.get("offset", 1.0)).to(case.get("input", x.dtype))
    return x.contiguous(memory_format=torch.channels_last) if case.get("channels_last") else x


def layer(case: Case) -> nn.Module:
    kinds = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}
    made = kinds[len(case["shape"])](case["shape"][0], **case.get("options", {}))
    if made.affine:
        with torch.no_grad():
            made.weight.copy_(torch.linspace(0.5, 2, len(made.weight)))
            made.bias.copy_(torch.linspace(-1, 1, len(made.bias)))
    return made.to(case.get("dtype", torch.float32))


def compare(case: Case) -> None:
    """Two steps, then evaluation."""
    rank, atol = dist.get_rank(), case.get("atol", 1e-5)
    whole, mine = layer(case), SyncBatchNorm.convert(layer(case))
    assert isinstance(mine, SyncBatchNorm) and isinstance(mine, nn.SyncBatchNorm)
    first = sum(case["rows"][:rank])
    part = slice(first, first + case["rows"][rank])
    for step in range(2):
        joined = data(case, step)
        weights = torch.randn(joined.shape, generator=torch.Generator().manual_seed(9)).to(joined.dtype)
        x_whole, x_mine = joined.clone().requires_grad_(), joined[part].clone().requires_grad_()
        out_whole, out_mine = whole(x_whole), mine(x_mine)
        assert out_mine.dtype is out_whole.dtype
        assert torch.allclose(out_mine, out_whole[part], atol=atol, rtol=1e-3)
        (out_whole * weights).sum().backward()
        (out_mine * weights[part]).sum().backward()
        assert torch.allclose(x_mine.grad, x_whole.grad[part], atol=atol, rtol=1e-2)
    for name, param in mine.named_parameters():
        total = param.grad.clone()
        dist.all_reduce(total)
        assert torch.allclose(total, whole.get_parameter(name).grad, atol=10 * atol, rtol=1e-2), name
    for name, buffer in mine.named_buffers():
        assert torch.allclose(buffer, whole.get_buffer(name), atol=atol, rtol=1e-4), name
    whole.eval()
    mine.eval()
    if mine.running_mean is None:
        return  # each rank's own batch, as with torch's
    assert torch.allclose(mine(joined[part]), whole(joined)[part], atol=atol, rtol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_joined_batch(pool: RankPool, name: str) -> None:
    pool.run(3, compare, CASES[name])


def whole_models() -> None:
    """Conversion of a tree with an optimizer already made, tied and nested norms, torch's synchronised one included."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()), nn.SyncBatchNorm(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, keys = list(model.parameters()), list(model.state_dict())
    assert SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert isinstance(model[1][0], SyncBatchNorm) and isinstance(model[2], SyncBatchNorm)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True)) and list(model.state_dict()) == keys
    bagua.distribute(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        made = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(5, 4, generator=made)).square().mean().backward()
        optimizer.step()
    for tensor in model.state_dict().values():
        rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, tensor)
        assert all(torch.equal(row, rows[0]) for row in rows)


def compiled() -> None:
    """The compiler leaves the layer out and takes the rest."""
    torch.manual_seed(0)
    model = SyncBatchNorm.convert(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    want = model(x)
    want.sum().backward()
    grad, model[0].weight.grad = model[0].weight.grad, None
    again = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        have = again(x)
        assert torch.allclose(have, want, atol=1e-6)
        model.zero_grad()
        have.sum().backward()
        assert torch.allclose(model[0].weight.grad, grad, atol=1e-6)


def test_within_a_compiled_module(pool: RankPool) -> None:
    pool.run(2, compiled)


def too_little() -> str:
    try:
        SyncBatchNorm(3)(torch.randn(int(dist.get_rank() == 0), 3))
    except ValueError as error:
        return str(error)
    return "no error"


def test_conversion_and_training(pool: RankPool) -> None:
    pool.run(2, whole_models)


def test_one_value_is_too_little(pool: RankPool) -> None:
    assert all("more than 1 value per channel among all ranks, got 1" in said for said in pool.run(2, too_little))


def test_alone_it_is_batch_norm() -> None:
    bagua.init_process_group()
    try:
        x = torch.randn(6, 3)
        assert torch.equal(SyncBatchNorm(3)(x), nn.BatchNorm1d(3)(x))
    finally:
        bagua.destroy_process_group()
