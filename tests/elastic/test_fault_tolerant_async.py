"""Averaging in the background with ranks that are killed, stopped and started: nobody stops, no step is lost."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest

from tests.elastic.fault_tolerant_rank import Job, Line, start_job
from tests.elastic.test_fault_tolerance import moves
from tests.fork_server import ForkServer

pytestmark = pytest.mark.process
ONCE = [1, 1, 1, 1]


def start(fork_server: ForkServer, size: int, **job: Any) -> Any:
    options = {"sync_interval_ms": 0, **job.pop("options", {})}
    # A rank that came later may count a round less than the others, and has no more without them.
    given = {"algorithm": "async", "options": options, "steps": 10, "rounds": 3, "until_told": True, **job}
    return start_job(fork_server, size, **given)


def check_async(job: Job, places: list[int], returned: int | None = None) -> list[Line]:
    """No step is lost, nobody else has changed a rank's weights, and rounds go on after the last change."""
    ends = job.ends([*places, returned] if returned is not None else places)
    for place in places:
        steps = [line for line in job.lines[place] if "attempt" in line]
        assert all(line["applied"] for line in steps)
        for before, now in itertools.pairwise(steps):
            assert now["entered"] == before["digest"] and now["steps"] == before["steps"] + 1
    return ends


@pytest.mark.parametrize("place", [0, 2])
def test_a_killed_rank_is_left_out(fork_server: ForkServer, place: int) -> None:
    others = [each for each in range(3) if each != place]
    with start(fork_server, 3, changes=ONCE) as job:
        job.signal_at(place, 10, signal.SIGKILL)
        ends = check_async(job, others)
    assert [moves(end) for end in ends] == [[((f"n{place}",), ())]] * 2


def test_a_rank_arrives(fork_server: ForkServer) -> None:
    with start(fork_server, 2, changes=ONCE) as job:
        job.wait_for([0, 1], lambda line: line.get("steps", 0) >= 10, "step 10")
        place = job.arrive()
        ends = check_async(job, [0, 1, place])
    begins = next(line for line in job.lines[place] if "begins" in line)
    held = {line["digest"] for line in job.lines[0] if "attempt" in line}  # of the first rank
    assert begins["begins"] >= 10 and begins["digest"] in held
    assert [moves(end) for end in ends[:2]] == [[((), ("n2",))]] * 2


@pytest.mark.parametrize("attempt", [3, 8])
def test_a_rank_is_killed_before_or_after_the_end_of_the_warm_up(fork_server: ForkServer, attempt: int) -> None:
    with start(fork_server, 3, changes=ONCE, options={"warmup_steps": 6}) as job:
        job.signal_at(1, attempt, signal.SIGKILL)
        ends = job.ends([0, 2])
    assert [moves(end) for end in ends] == [[(("n1",), ())]] * 2
    for place in (0, 2):
        skipped = [line["attempt"] for line in job.lines[place] if not line.get("applied", True)]
        assert len(skipped) <= 2 and all(each < 9 for each in skipped)


def test_a_stopped_rank_is_left_out_and_joins_again_when_it_wakes(fork_server: ForkServer) -> None:
    with start(fork_server, 3, detect_s=4.0, changes=[1, 2, 2]) as job:  # it serves the store of the gate
        job.signal_at(0, 10, signal.SIGSTOP)
        job.wait_for([1, 2], lambda line: line.get("changes") == 1 and line["rounds"] > 1, "round without it")
        job.resume(0)
        ends = check_async(job, [1, 2], returned=0)
    assert [moves(end) for end in ends[:2]] == [[(("n0",), ()), ((), ("n0",))]] * 2


def test_nobody_waits_for_a_rank_that_does_not_open_its_groups(fork_server: ForkServer) -> None:
    with start(fork_server, 3, changes=ONCE, holds_at=[2, 6]) as job:
        job.wait_for([2], lambda line: "holds" in line, "step 6")
        job.signal_at(1, 10, signal.SIGKILL)
        job.wait_for([0], lambda line: line.get("opening", False), "step while groups are opened")
        first = next(line["steps"] for line in job.lines[0] if line.get("opening"))
        job.wait_for([0], lambda line: line.get("opening", False) and line["steps"] >= first + 30, "30 such steps")
        job.go_on(2)
        ends = check_async(job, [0, 2])
    assert moves(ends[0]) == moves(ends[1]) == [(("n1",), ())]


@pytest.mark.slow
@pytest.mark.parametrize("place", range(4))
def test_a_lost_rank_is_replaced(fork_server: ForkServer, place: int) -> None:
    others = [each for each in range(4) if each != place]
    with start(fork_server, 4, changes=[2, 2, 2, 2, 1]) as job:
        job.signal_at(place, 10, signal.SIGKILL)
        job.wait_for(others, lambda line: line.get("changes") == 1 and line["rounds"] > 1, "round without it")
        new = job.arrive()
        ends = check_async(job, [*others, new])
    assert [moves(end) for end in ends[:3]] == [[((f"n{place}",), ()), ((), ("n4",))]] * 3


@pytest.mark.slow
def test_two_ranks_are_lost_one_after_the_other(fork_server: ForkServer) -> None:
    with start(fork_server, 4, tie_break=True, changes=[2, 2, 2, 2]) as job:
        job.signal_at(3, 5, signal.SIGKILL)
        job.wait_for([0, 1, 2], lambda line: line.get("changes") == 1, "epoch without it")
        job.kill(1)
        ends = check_async(job, [0, 2])
    assert moves(ends[0]) == moves(ends[1]) == [(("n3",), ()), (("n1",), ())]
