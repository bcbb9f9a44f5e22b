"""Fused optimizers on the flat buckets of `bagua.distribute`: the same numbers, and nothing held twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.engine.distributed_module import attached_buckets
from bagua.optim.fused.stepper import Stepper
from tests.rank_pool import RankPool


def model_of(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[part for _ in range(6) for part in (nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))]
    )


def stepper_of(optimizer: torch.optim.Optimizer) -> Stepper:
    return vars(optimizer)["_bagua_stepper"]


def train(algorithm: str, fused: str, set_to_none: bool) -> dict[str, Any]:
    """On a rank: train; switch the algorithm in the middle, then detach and go on alone."""
    rank = torch.distributed.get_rank()
    model = model_of(12)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if fused == "before":
        bagua.optim.fuse(optimizer)
    bagua.distribute(model, optimizer, algorithm, bucket_bytes=2000)
    if fused == "after":
        bagua.optim.fuse(optimizer)
    seen: dict[str, Any] = {}
    torch.manual_seed(rank)
    for step in range(10):
        if step == 6:
            bagua.distribute(model, optimizer, "gradient_allreduce", bucket_bytes=3000)
        if step == 9:
            bagua.detach(model)
        model(torch.randn(4, 12)).square().mean().backward()
        optimizer.step()
        if fused and step in (5, 8):
            buckets = attached_buckets(model)
            seen[f"kinds {step}"] = [arena.kind for arena in stepper_of(optimizer).arenas]
            seen[f"shared {step}"] = shared(buckets, stepper_of(optimizer))
            seen[f"pieces {step}"] = sum(len(u.pieces) for a in stepper_of(optimizer).arenas for u in a.units)
            seen[f"buckets {step}"] = len(buckets)
        optimizer.zero_grad(set_to_none=set_to_none)
    seen["weights"] = [param.detach().clone() for param in model.parameters()]
    seen["state"] = [slot["exp_avg"].clone() for slot in optimizer.state.values()]
    return seen


def shared(buckets: list[Any], stepper: Stepper) -> bool:
    """Whether each bucket's flat tensor is what the stepper uses, as gradient or as parameter."""
    used = {arena.flat.untyped_storage().data_ptr() for arena in stepper.arenas}
    used |= {a.grad.untyped_storage().data_ptr() for a in stepper.arenas if a.grad is not None}
    return all(bucket.flat.untyped_storage().data_ptr() in used for bucket in buckets)


@pytest.mark.parametrize("fused", ["before", "after"])
@pytest.mark.parametrize("algorithm", ["bytegrad", "decentralized"])
def test_same_numbers_on_shared_memory(pool: RankPool, algorithm: str, fused: str) -> None:
    for set_to_none in (True, False):
        plain = pool.run(2, train, algorithm, "", set_to_none)
        got = pool.run(2, train, algorithm, fused, set_to_none)
        for one, other in zip(plain, got, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))
            assert all(torch.equal(a, b) for a, b in zip(one["state"], other["state"], strict=True))
            first = "mirrored" if algorithm == "bytegrad" else "gathered"
            assert set(other["kinds 5"]) == {first} and set(other["kinds 8"]) == {"mirrored"}
            assert other["shared 5"] and other["shared 8"]
            assert other["pieces 5"] == other["buckets 5"] > 1
            assert other["pieces 8"] == other["buckets 8"] > 1


def train_alternating(fused: bool) -> tuple[list[torch.Tensor], list[str]]:
    """On a rank: weights decay, the rest does not, so neighbours in a bucket belong to different groups."""
    model = model_of(12)
    groups = [
        {"params": [param for param in model.parameters() if param.ndim > 1], "weight_decay": 0.5},
        {"params": [param for param in model.parameters() if param.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    if fused:
        bagua.optim.fuse(optimizer)
    bagua.distribute(model, optimizer)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(5):
        model(torch.randn(4, 12)).square().mean().backward()
        buckets = [bucket.flat.untyped_storage().data_ptr() for bucket in attached_buckets(model)]
        optimizer.step()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert {grad.untyped_storage().data_ptr() for grad in grads} == set(buckets)  # they stay where they are
        optimizer.zero_grad(set_to_none=False)
    kinds = [arena.kind for arena in stepper_of(optimizer).arenas] if fused else []
    return [param.detach().clone() for param in model.parameters()], kinds


def test_groups_that_alternate_in_the_buckets(pool: RankPool) -> None:
    plain, _ = pool.run(2, train_alternating, False)[0]
    got, kinds = pool.run(2, train_alternating, True)[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))
    assert kinds[0] == "gathered" and len(kinds) < 10
