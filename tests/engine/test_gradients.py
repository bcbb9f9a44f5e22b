"""Synchronous gradients: equal to DistributedDataParallel's, or within the codec's bound of them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua
from tests.engine.training import Net, batch, distributed, equal, gradients, seeded, train, values
from tests.rank_pool import RankPool


def against_ddp(set_to_none: bool, accumulate: bool) -> list[tuple[dict, dict]]:
    plain, ours = seeded(Net, 0), seeded(Net, 0)
    reference = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ours)]
    bagua.distribute(ours, optimizers[1])
    found = []
    for step in range(4):
        ours.load_state_dict(plain.state_dict())  # a difference in one step must not show in the next
        for model, optimizer in ((reference, optimizers[0]), (ours, optimizers[1])):
            optimizer.zero_grad(set_to_none=set_to_none)
            if accumulate:
                with model.no_sync() if model is reference else bagua.no_sync(ours):
                    model(batch(dist.get_rank(), 100 + step)).square().mean().backward()
            model(batch(dist.get_rank(), step)).square().mean().backward()
            optimizer.step()
        found.append((gradients(plain), gradients(ours)))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulate", [False, True])
def test_equal_to_ddp_to_the_last_bit(pool: RankPool, size: int, set_to_none: bool, accumulate: bool) -> None:
    """Equal bits, but for two cases in which DDP itself computes in another order, where they are merely close:

    - its first step lays the bucket out in another order than all later ones, and gloo's ring adds in an order
      that depends on the position in the buffer (of no consequence with two ranks);
    - it multiplies a gradient by 1/size when it copies it into the bucket, as here, but divides by size one that
      lies there already (of no consequence with two or four ranks).
    """
    for found in pool.run(size, against_ddp, set_to_none, accumulate):
        for step, (theirs, ours) in enumerate(found):
            if size <= 2 or (step > 0 and (set_to_none or size == 4)):
                assert equal(theirs, ours), f"step {step}"
            for name, grad in theirs.items():
                assert grad is None or torch.allclose(grad, ours[name], rtol=1e-5, atol=1e-7), (step, name)


def one_backward(algorithm: str, options: dict, bucket_bytes: int) -> tuple[dict, dict]:
    """Local gradients and synchronised ones of the same batch, in the second step (the first has no overlap)."""
    model, optimizer = distributed(Net, algorithm, bucket_bytes=bucket_bytes, **options)
    train(model, optimizer, [0])
    local = copy.deepcopy(model)  # a plain module
    optimizer.zero_grad()
    for each in (local, model):
        each(batch(dist.get_rank(), 1)).square().mean().backward()
    return gradients(local), gradients(model)


SIZES, OPTIONS = [2, 3, 4], [{}, {"error_feedback": True}, {"average": False}]


@pytest.mark.parametrize(  # each size of buckets meets each number of ranks, and each option both of them
    ("bucket_bytes", "size", "options"),
    [
        (bucket_bytes, SIZES[j], OPTIONS[(i + j) % 3])
        for i, bucket_bytes in enumerate([1, 200, 1 << 20])
        for j in range(3)
    ],
)
def test_bytegrad_is_within_the_bound_of_its_codec(pool: RankPool, size: int, bucket_bytes: int, options: dict) -> None:
    results = pool.run(size, one_backward, "bytegrad", options, bucket_bytes)
    factor = size if options.get("average") is False else 1
    span = max(float(g.max() - g.min()) for local, _ in results for g in local.values() if g is not None)
    top = max(float(g.abs().max()) for local, _ in results for g in local.values() if g is not None)
    # A block may hold several tensors, so its range is at most 2 * top; twice, for the two quantisations, and
    # twice that with error feedback, which adds what the step before has lost.
    bound = factor * max(span, 2 * top) * 0.51 / 255 * 2 * (2 if options.get("error_feedback") else 1)
    for name in results[0][0]:
        if results[0][0][name] is None:
            continue
        want = torch.stack([local[name] for local, _ in results]).mean(0) * factor
        for _, synced in results:
            assert torch.equal(synced[name], results[0][1][name])
            assert (synced[name] - want).abs().max() <= bound
    if size > 1:
        assert any(
            not torch.allclose(
                synced[n], torch.stack([loc[n] for loc, _ in results]).mean(0) * factor, rtol=1e-6, atol=0
            )
            for _, synced in results
            for n in synced
            if synced[n] is not None
        ), "nothing was lost, so nothing was compressed"


def train_and_report(algorithm: str, options: dict) -> tuple[dict, int]:
    model, optimizer = distributed(Net, algorithm, bucket_bytes=100, **options)
    train(model, optimizer, range(5))
    return {n: p for n, p in values(model).items() if "norm.running" not in n and "num_batches" not in n}, bagua.stats(
        model
    ).num_buckets


@pytest.mark.parametrize(
    ("nodes", "hierarchical", "algorithm"),
    [
        (nodes, hierarchical, ["gradient_allreduce", "bytegrad"][(i + j) % 2])
        for i, nodes in enumerate([[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 1, 2]])
        for j, hierarchical in enumerate([None, True, False])
    ],
)
def test_replicas_stay_equal(pool: RankPool, algorithm: str, hierarchical: bool | None, nodes: list[int]) -> None:
    results = pool.run(3, train_and_report, algorithm, {"hierarchical": hierarchical}, nodes=nodes)
    assert results[0][1] > 2
    for weights, _ in results:
        assert equal(weights, results[0][0])


def sync_with_sum() -> tuple[dict, dict]:
    return one_backward("gradient_allreduce", {"average": False}, 1 << 20)


def test_sum_instead_of_mean(pool: RankPool) -> None:
    results = pool.run(2, sync_with_sum)
    for name, grad in results[0][1].items():
        if grad is not None:
            assert torch.allclose(grad, results[0][0][name] + results[1][0][name], atol=1e-6)


class Half(nn.Module):
    """Parameters of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 4).double()
        self.bf16 = nn.Linear(4, 4).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bf16(self.wide(self.single(x).double()).bfloat16()).float()


def mixed_dtypes(algorithm: str) -> tuple[dict, list[set]]:
    model, optimizer = distributed(Half, algorithm)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(dist.get_rank(), step, 4)).square().mean().backward()
        optimizer.step()
    return values(model), [{p.dtype for p in b.params} for b in bagua.engine.api.live_engines()[-1].buckets]


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_one_bucket_one_dtype(pool: RankPool, algorithm: str) -> None:
    results = pool.run(2, mixed_dtypes, algorithm)
    assert equal(results[0][0], results[1][0])
    assert all(len(kinds) == 1 for kinds in results[0][1]) and len(results[0][1]) == 3


def channels_last() -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step)).to(memory_format=torch.channels_last)
        model(x).sum().backward()
        optimizer.step()
    grad = model[0].weight.grad
    assert grad is not None
    return grad.stride() == model[0].weight.stride()


def test_gradients_keep_the_memory_format(pool: RankPool) -> None:
    assert pool.run(2, channels_last) == [True, True]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.last = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.conv(x).flatten(1).tanh())


def moved(algorithm: str, how: str, set_to_none: bool) -> list[dict]:
    """Gradients of each step; before some steps, and within an accumulation, the module moves to where it is."""
    model, optimizer = distributed(Images, algorithm)

    def backward(step: int) -> None:
        x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()

    def move() -> None:
        if how == "device":
            model.to("cpu:0")  # copies: "cpu" is another device to Tensor.to
        elif how == "layout":
            model.to(memory_format=torch.channels_last)

    found = []
    for step in range(4):
        if step == 2:
            move()
        optimizer.zero_grad(set_to_none=set_to_none)
        if step == 3:
            with bagua.no_sync(model):
                backward(100)
            move()
        backward(step)
        found.append({name: grad.contiguous() for name, grad in gradients(model).items() if grad is not None})
        optimizer.step()
    return found


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_module_that_moves_to_where_it_is(pool: RankPool, algorithm: str, set_to_none: bool) -> None:
    """`module.to` assigns to `.grad.data` too, which used to take the gradients out of their bucket for good."""
    stays = pool.run(2, moved, algorithm, "not", set_to_none)
    assert equal(stays[0], stays[1])
    for how in ("device", "layout"):
        moves = pool.run(2, moved, algorithm, how, set_to_none)
        assert equal(moves[0], moves[1]), how
        for mine, theirs in zip(stays[0], moves[0], strict=True):
            if how == "device":
                assert equal(mine, theirs)
            elif algorithm == "gradient_allreduce":  # another layout: convolutions add in another order
                assert all(torch.allclose(mine[name], theirs[name], rtol=1e-3, atol=1e-4) for name in mine)
