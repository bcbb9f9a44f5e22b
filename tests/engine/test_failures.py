"""A rank that dies, stays away or fails: the others say so within the timeout, and nobody waits forever."""

# Attributes of modules are tensors or modules for the type checker.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import os
import pickle
import re
import time
import traceback

import pytest
import torch
import torch.distributed as dist

import bagua
from bagua.algorithms.base import Exactness
from bagua.exchanges import Exchange
from tests.engine.training import distributed, train
from tests.rank_pool import RankPool


def recorded() -> tuple[bool, list[str]]:
    model, optimizer = distributed(transport="gloo")  # torch records its own backends alone
    train(model, optimizer, range(2))
    if dist.get_rank() == 1:
        os._exit(9)
    with pytest.raises(bagua.CommunicationError) as caught:
        train(model, optimizer, [2])
    dump = caught.value.flight_recorder
    off = os.environ.get("TORCH_FR_BUFFER_SIZE") == "0"
    return off, [] if dump is None else [each["profiling_name"] for each in pickle.loads(dump)["entries"]]


def test_what_torch_recorded_is_with_the_error(pool: RankPool) -> None:
    """Off by default before torch 2.13, see `bagua.comm.flight_recorder`."""
    off, names = pool.run(2, recorded, group_timeout_s=8, timeout_s=90, dies=[1])[0]
    assert off == (tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13))
    assert names == [] if off else "gloo:all_reduce" in names


def lose_a_rank(how: str) -> tuple[str, str, float]:
    model, optimizer = distributed(bucket_bytes=100)
    train(model, optimizer, range(3))
    rank, size = dist.get_rank(), dist.get_world_size()
    started = time.monotonic()
    if rank == size - 1:
        if how == "dies":
            os._exit(9)
        time.sleep(13)  # longer than the group's timeout
        return "", "", 0.0
    try:
        train(model, optimizer, [3])
    except bagua.CommunicationError as error:
        took = time.monotonic() - started
        again = ""
        try:
            train(model, optimizer, [4])
        except bagua.CommunicationError as second:
            again = str(second)
        return "".join(traceback.format_exception(error)), again, took
    return "no error", "", 0.0


@pytest.mark.parametrize(("how", "size"), [("dies", 2), ("dies", 3), ("late", 3)])
def test_lost_rank_is_named(pool: RankPool, how: str, size: int) -> None:
    results = pool.run(
        size, lose_a_rank, how, group_timeout_s=8, timeout_s=90, dies=[size - 1] if how == "dies" else []
    )
    for rank in range(size - 1):
        message, again, took = results[rank]
        assert "bagua.errors.CommunicationError" in message
        assert "step 3" in message and "bucket 0" in message, message
        assert f"no response from rank {size - 1}: it has exited or is late. If it made fewer steps" in message, message
        raised = [line for line in message.splitlines() if line.startswith("bagua.errors.CommunicationError: rank ")]
        assert raised[-1].count("CommunicationError") == 1, "the class of the lane's own error is not repeated"
        assert "The above exception was the direct cause" in message, "the lane's own traceback is chained"
        assert "bagua.distribute() again" in again
        assert took < 60


class Freely(bagua.algorithms.GradientAllReduce):
    """As if ranks made as many steps as they like."""

    name = "freely"
    exactness = Exactness.ASYNCHRONOUS


def lose_a_free_rank() -> str:
    model, optimizer = distributed(algorithm=Freely())
    train(model, optimizer, range(3))
    if dist.get_rank() == 1:
        os._exit(9)
    with pytest.raises(bagua.CommunicationError) as caught:
        train(model, optimizer, [3])
    return str(caught.value)


def test_no_number_of_steps_is_advised_where_ranks_make_their_own(pool: RankPool) -> None:
    message = pool.run(2, lose_a_free_rank, group_timeout_s=8, timeout_s=90, dies=[1])[0]
    assert "no response from rank 1: it has exited or is late. Read its log" in message, message
    assert "drop_last" not in message


class Broken(Exchange):
    """Fails in the lane of rank 0."""

    def run(self, x_N, state, groups, step) -> None:
        if step == 1 and groups.rank == 0:
            raise ZeroDivisionError("deliberate")

    def bytes_per_rank(self, n: int, size: int) -> float:
        return 0


class Fails(bagua.algorithms.GradientAllReduce):
    """Uses `Broken`."""

    name = "fails"
    exchange = Broken()  # pyright: ignore[reportAssignmentType]


def fail_in_the_lane() -> str:
    model, optimizer = distributed(algorithm=Fails())
    try:
        train(model, optimizer, range(3))
    except bagua.CommunicationError:
        return traceback.format_exc()
    return "no error"


def test_exception_in_a_lane_surfaces_in_the_training_thread(pool: RankPool) -> None:
    first, second = pool.run(2, fail_in_the_lane)
    assert "ZeroDivisionError: deliberate" in first and "in run" in first
    assert "in train" in first, "raised where the user's code called"
    assert "Broken step 1 bucket 0" in first
    assert second == "no error"


def absent_at_distribute() -> str:
    if dist.get_rank() == 1:
        time.sleep(7)
        return ""
    started = time.monotonic()
    try:
        distributed()
    except bagua.CommunicationError as error:
        assert time.monotonic() - started < 60
        return str(error)
    return "no error"


def test_rank_that_does_not_call_distribute_is_named(pool: RankPool) -> None:
    message = pool.run(3, absent_at_distribute, group_timeout_s=5)[0]
    # On a busy machine rank 2 may be late, too.
    assert re.search(r"bagua\.distribute\(\): rank 1(, 2)? did not arrive within 5 s", message), message


def interrupted_backward() -> list[int]:
    """An exception in the middle of a backward pass on all ranks; training goes on afterwards."""
    model, optimizer = distributed(bucket_bytes=100)
    train(model, optimizer, range(2))

    def explode(grad: torch.Tensor) -> torch.Tensor:
        raise MemoryError("deliberate")

    optimizer.zero_grad()
    handle = model.first.weight.register_hook(explode)
    try:
        model(torch.randn(4, 6)).sum().backward()
    except MemoryError:
        handle.remove()
    train(model, optimizer, range(2, 5))
    total = model.first.weight.detach().clone()
    dist.all_reduce(total)
    assert torch.allclose(total, 2 * model.first.weight)
    return [bagua.stats(model).steps]


def test_training_goes_on_after_an_exception_in_backward(pool: RankPool) -> None:
    pool.run(2, interrupted_backward)
