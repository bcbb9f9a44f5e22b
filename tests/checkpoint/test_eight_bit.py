"""Optimizer states that are tensor subclasses, such as torchao's 8-bit ones, are saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bagua
from tests.engine.eight_bit import SGD8, Codes, Flat, momenta
from tests.engine.training import Net, equal, seeded, train, values
from tests.rank_pool import RankPool


def make(algorithm: str, kind: Callable[[Tensor, Tensor], Tensor] = Flat) -> tuple[torch.nn.Module, SGD8]:
    model = seeded(Net, 0)
    optimizer = SGD8([p for p in model.parameters() if p.requires_grad], kind)
    return bagua.distribute(model, optimizer, algorithm), optimizer


def save(algorithm: str, path: str) -> dict[str, Tensor]:
    torch.serialization.add_safe_globals([Flat])
    model, optimizer = make(algorithm)
    train(model, optimizer, range(3))
    bagua.checkpoint.save(path, {"model": model, "optimizer": optimizer}, step=3)
    before = momenta(optimizer)
    train(model, optimizer, range(3, 6))
    assert not equal(before, momenta(optimizer))
    return values(model)


def load(algorithm: str, path: str) -> tuple[dict[str, Tensor], set[type]]:
    torch.serialization.add_safe_globals([Flat])
    model, optimizer = make(algorithm)
    loaded = bagua.checkpoint.load(path, {"model": model, "optimizer": optimizer})
    assert loaded is not None
    kinds = {type(slot["momentum"]) for slot in optimizer.state.values()}
    train(model, optimizer, range(3, 6))
    return values(model), kinds


@pytest.mark.parametrize("algorithm", ["bytegrad", "local_sgd"])
def test_saved_and_loaded(pool: RankPool, tmp_path: Path, algorithm: str) -> None:
    expected = pool.run(2, save, algorithm, str(tmp_path))
    for (found, kinds), trained in zip(pool.run(2, load, algorithm, str(tmp_path)), expected, strict=True):
        assert kinds == {Flat}
        assert equal(list(found.values()), list(trained.values()))
    for found, kinds in pool.run(3, load, algorithm, str(tmp_path)):
        assert kinds == {Flat}
        assert all(value.isfinite().all() for value in found.values())


def message(kind: Callable[[Tensor, Tensor], Tensor], safe: list[type], path: str) -> str:
    model = seeded(Net, 0)
    optimizer = SGD8([p for p in model.parameters() if p.requires_grad], kind)
    bagua.distribute(model, optimizer, "bytegrad")
    train(model, optimizer, range(1))
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals([*safe]), pytest.raises(bagua.checkpoint.CheckpointError) as caught:
            bagua.checkpoint.save(path, {"optimizer": optimizer}, step=1)
    finally:
        torch.serialization.add_safe_globals(before)
    return str(caught.value)


def test_what_could_not_be_loaded_is_refused(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path)
    for text in pool.run(1, message, Codes, [Codes], path):
        assert "optimizer.state.0.momentum is a Codes; bagua.checkpoint saves plain tensors only, and" in text
    for text in pool.run(2, message, Flat, [], path):
        assert "is a Flat, which torch.load would refuse; call torch.serialization.add_safe_globals([Flat])" in text
