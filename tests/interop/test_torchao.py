"""torchao's optimizers with 8 and 4 bits of state: trained with, switched, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from tests.engine.training import seeded
from tests.rank_pool import RankPool

pytest.importorskip("torchao", reason="needs torchao; `make test-interop` runs it")
pytestmark = [pytest.mark.process, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

BITS = {8: "AdamW8bit", 4: "AdamW4bit"}
OPTIONS = {"local_sgd": {"communication_interval": 2}}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64))


def make(bits: int, algorithm: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    import torchao.optim  # pyright: ignore[reportMissingImports]

    model = seeded(net, dist.get_rank())
    optimizer = getattr(torchao.optim, BITS[bits])(model.parameters(), lr=1e-2)
    bagua.distribute(model, optimizer, algorithm, **OPTIONS.get(algorithm, {}))
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()]).clone()


def compressed_states(optimizer: torch.optim.Optimizer) -> int:
    slots: list[Any] = [value for slot in optimizer.state.values() for value in slot.values()]
    return sum(type(value).__name__.startswith("OptimState") for value in slots)


def switch(bits: int, first: str, then: str) -> tuple[Tensor, int]:
    model, optimizer = make(bits, first)
    train(model, optimizer, range(4))
    bagua.distribute(model, optimizer, then, **OPTIONS.get(then, {}))
    train(model, optimizer, range(4, 8))
    bagua.average_parameters(model)
    return weights(model), compressed_states(optimizer)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("first", "then"), [("bytegrad", "local_sgd"), ("local_sgd", "gradient_allreduce")])
def test_a_switch(pool: RankPool, bits: int, first: str, then: str) -> None:
    (mine, compressed), (theirs, _) = pool.run(2, switch, bits, first, then, timeout_s=200)
    assert torch.equal(mine, theirs) and mine.isfinite().all()
    assert compressed > 0


def save(bits: int, algorithm: str, path: str) -> Tensor:
    model, optimizer = make(bits, algorithm)
    train(model, optimizer, range(3))
    bagua.checkpoint.save(path, {"model": model, "optimizer": optimizer}, step=3)
    train(model, optimizer, range(3, 6))
    return weights(model)


def load(bits: int, algorithm: str, path: str) -> tuple[Tensor, int]:
    model, optimizer = make(bits, algorithm)
    assert bagua.checkpoint.load(path, {"model": model, "optimizer": optimizer}) is not None
    train(model, optimizer, range(3, 6))
    return weights(model), compressed_states(optimizer)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("algorithm", ["bytegrad", "local_sgd"])
def test_a_checkpoint(pool: RankPool, tmp_path: Path, bits: int, algorithm: str) -> None:
    expected = pool.run(2, save, bits, algorithm, str(tmp_path), timeout_s=200)
    found = pool.run(2, load, bits, algorithm, str(tmp_path), timeout_s=200)
    for want, (got, compressed) in zip(expected, found, strict=True):
        assert torch.equal(want, got) and compressed > 0
