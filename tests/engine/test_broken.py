"""An exception in backward that is caught: all ranks void the step, or all raise and name the rank; nothing stale."""

# Attributes of modules are tensors or modules for the type checker.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from tests.engine.training import batch, distributed, equal, train, values
from tests.rank_pool import RankPool


class Stops(torch.autograd.Function):
    """Raises in backward if told to."""

    error: type[BaseException] | None = None

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if Stops.error is not None:
            raise Stops.error("deliberate")
        return grad


class Net(nn.Module):
    """The backward pass breaks off where `at` says: before any gradient, between them, or after all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.at = "middle"

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for number, layer in enumerate(self.layers):
            if (self.at, number) in (("end", 0), ("middle", 2)):
                x = Stops.apply(x)
            x = layer(x).tanh()
        return Stops.apply(x) if self.at == "start" else x


def broken_on_some(algorithm: str, at: str, kind: str, who: list[int]) -> tuple[str, float, bool]:
    """Ranks of `who` break off step 2 and go on with the next batch, as loops that skip bad batches do."""
    model, optimizer = distributed(Net, algorithm, bucket_bytes=100)
    model.at = at
    train(model, optimizer, range(2))
    rank, message = dist.get_rank(), ""
    started = time.monotonic()
    error = {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}[kind]
    for step in range(2, 5):
        optimizer.zero_grad()
        Stops.error = error if step == 2 and rank in who else None
        try:
            model(batch(rank, step)).square().mean().backward()
        except error:
            continue
        except bagua.CommunicationError as trouble:
            message = str(trouble)
            break
        finally:
            Stops.error = None
        try:
            optimizer.step()
        except bagua.CommunicationError as trouble:
            message = str(trouble)
            break
    took = time.monotonic() - started
    nothing_left = all(p.grad is None or not p.grad.any() for p in model.parameters())
    with pytest.raises(bagua.CommunicationError, match=r"call bagua.distribute\(\) again"):
        optimizer.step()
    bagua.distribute(model, optimizer, algorithm, bucket_bytes=100)
    train(model, optimizer, range(5, 7))
    assert_equal_weights(model)
    return message, took, nothing_left


def assert_equal_weights(model: nn.Module) -> None:
    for param in model.parameters():
        others = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(others, param.detach())
        assert all(torch.equal(param, other) for other in others)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
@pytest.mark.parametrize(
    ("at", "kind", "who", "size"),
    [
        ("start", "ValueError", [1], 2),
        ("middle", "KeyboardInterrupt", [0], 2),
        ("middle", "ValueError", [1, 2], 3),
        ("end", "ValueError", [1], 3),
    ],
)
def test_all_ranks_raise_and_name_the_one(
    pool: RankPool, algorithm: str, at: str, kind: str, who: list[int], size: int
) -> None:
    named = f"interrupted the backward pass of rank {', '.join(map(str, who))} but not of all ranks"
    args = algorithm, at, kind, who
    for message, took, nothing_left in pool.run(size, broken_on_some, *args, group_timeout_s=120, timeout_s=150):
        assert named in message, message
        assert nothing_left and took < 100


def broken_on_all(algorithm: str, at: str, steps: int, first: int) -> tuple[dict, dict, int]:
    """All ranks break off the same step, rank 1 later than rank 0, and go on. The same without these steps."""
    weights = []
    for breaks in (True, False):
        model, optimizer = distributed(Net, algorithm, seed_by_rank=False, bucket_bytes=100)
        model.at = at
        rank = dist.get_rank()
        for step in range(steps):
            optimizer.zero_grad()
            if step in (first, 4) and breaks:
                model.at = "end" if rank and at != "start" else at
                Stops.error = MemoryError
                with pytest.raises(MemoryError):
                    model(batch(rank, 100 + step)).square().mean().backward()
                Stops.error = None
                model.at = at
                optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        weights.append(values(model))
        assert_equal_weights(model)
        steps_made = bagua.stats(model).steps
        bagua.detach(model)
    return weights[0], weights[1], steps_made


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
@pytest.mark.parametrize(("at", "first"), [("start", 2), ("middle", 2), ("middle", 0)])
def test_a_step_that_all_ranks_break_off_is_void(pool: RankPool, algorithm: str, at: str, first: int) -> None:
    for broken, plain, steps in pool.run(2, broken_on_all, algorithm, at, 6, first):
        assert steps == 6
        if first:  # the order of the gradients, and with it the buckets, is that of the first pass
            assert equal(broken, plain)


def weights_algorithm(algorithm: str, options: dict) -> tuple[int, int]:
    """Rank 1 loses a batch and makes the step with the next one; ranks still meet at the same steps."""
    model, optimizer = distributed(Net, algorithm, seed_by_rank=False, **options)
    rank, data = dist.get_rank(), 0
    while bagua.stats(model).steps < 6:
        optimizer.zero_grad()
        data += 1
        Stops.error = ValueError if data == 3 and rank == 1 else None
        try:
            model(batch(rank, data)).square().mean().backward()
        except ValueError:
            continue
        optimizer.step()
    bagua.average_parameters(model)
    assert_equal_weights(model)
    return data, bagua.stats(model).steps


@pytest.mark.parametrize(
    ("algorithm", "options"), [("decentralized", {}), ("local_sgd", {"communication_interval": 2})]
)
def test_weights_algorithms_make_the_step_with_another_batch(pool: RankPool, algorithm: str, options: dict) -> None:
    results = pool.run(2, weights_algorithm, algorithm, options)
    assert results == [(6, 6), (7, 6)]


def distributes_at_once() -> bool:
    """Rank 1 answers its exception with `distribute`, without another pass; rank 0 answers the error it gets."""
    model, optimizer = distributed(Net, bucket_bytes=100)
    train(model, optimizer, range(2))
    Stops.error = ValueError if dist.get_rank() == 1 else None
    with pytest.raises((ValueError, bagua.CommunicationError)):
        model(batch(0, 2)).square().mean().backward()
    Stops.error = None
    bagua.distribute(model, optimizer, bucket_bytes=100)
    train(model, optimizer, range(2))
    assert_equal_weights(model)
    return True


def test_distribute_is_the_way_back(pool: RankPool) -> None:
    assert pool.run(2, distributes_at_once) == [True, True]


def gradient_taken_away() -> list[Tensor]:
    """A hook sets `.grad` to None before its bucket leaves: the parameter counts as zero, not as the last mean."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    taken = model[1].weight
    drop = False

    def hook(param: Tensor) -> None:
        if drop:
            param.grad = None

    taken.register_post_accumulate_grad_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    bagua.distribute(model, optimizer)
    found = []
    for drop in (False, dist.get_rank() == 1):  # noqa: B007 - the hook reads it
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        found.append(taken.grad.clone())
    return found


def test_a_gradient_that_is_gone_counts_as_zero(pool: RankPool) -> None:
    for first, second in pool.run(2, gradient_taken_away):
        assert float(first) == 4.0 and float(second) == 2.0
