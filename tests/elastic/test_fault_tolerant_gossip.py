"""Gossip with ranks that are killed, stopped and started: each survivor trains on with its own weights."""

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
RING = {"topology": "ring"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("decentralized", {}),
    "ring": ("decentralized", RING),
    "shift_one": ("decentralized", {"topology": "shift_one"}),
    "exponential": ("decentralized", {"topology": "exponential"}),
    "interval": ("decentralized", {"topology": "ring", "communication_interval": 3}),
    "quantised": ("decentralized", {"topology": "ring", "codec": "minmax_uint8"}),
    "low_precision": ("low_precision_decentralized", {}),
    "overlap": ("low_precision_decentralized", {"overlap": True}),
}
# Every step pulls the ranks apart by 0.002 at most, and apart from that for 30 steps they would be at 0.06.
PULL, STEPS, APART = 10.0, 30, 0.03


def start(fork_server: ForkServer, kind: str, size: int, **job: Any) -> Any:
    algorithm, options = KINDS[kind]
    given = {"pull": PULL, "steps": STEPS, "gossip": True, "bucket_bytes": 8192, "options": options, **job}
    return start_job(fork_server, size, algorithm=algorithm, **given)


def check_gossip(job: Job, places: list[int], returned: int | None = None) -> list[Line]:
    """Nobody but the rank itself has changed its weights, ranks still average, and replicas are those of the peers.

    A rank that is lost costs nobody more than the steps by which another one was ahead.

    Args:
        returned: a rank that was left out for a while, and has taken over the weights of another one.
    """
    ends = job.ends([*places, returned] if returned is not None else places)
    assert len({end["steps"] for end in ends}) == 1
    for place in places:
        steps = [line for line in job.lines[place] if "attempt" in line]
        for before, now in itertools.pairwise(steps):
            assert now["entered"] == before["digest"]
            assert (now["digest"] != now["entered"]) == now["applied"]
        assert sum(not line["applied"] for line in steps) <= job.options.get("communication_interval", 1)
    for one, other in itertools.combinations(ends, 2):
        apart = max(abs(a - b) for a, b in zip(one["weights"], other["weights"], strict=True))
        assert 0 < apart < APART
    check_replicas([end["replicas"] for end in ends])
    return ends


def check_replicas(kept: list[Line]) -> None:
    """What a rank remembers of its neighbours on the ring is what they remember of themselves."""
    by_rank = {each["rank"]: each for each in kept}
    for rank, each in by_rank.items():
        size = each["size"]
        around = [(rank - 1) % size, (rank + 1) % size] if size > 2 else [1 - rank]
        for part, rows in each["peers"].items():
            assert rows == [by_rank[peer]["me"][part] for peer in around]


@pytest.mark.parametrize(
    ("kind", "place"), [("all", 1), ("ring", 0), ("exponential", 2), ("low_precision", 1), ("overlap", 0)]
)
def test_a_killed_rank_is_left_out(fork_server: ForkServer, kind: str, place: int) -> None:
    others = [each for each in range(4) if each != place]
    with start(fork_server, kind, 4, changes=ONCE) as job:
        job.signal_at(place, 10, signal.SIGKILL)
        ends = check_gossip(job, others)
    assert [moves(end) for end in ends] == [[((f"n{place}",), ())]] * 3


def check_death(fork_server: ForkServer, kind: str, where: str) -> None:
    """Rank 2 dies at a given point of step 12."""
    with start(fork_server, kind, 4, changes=ONCE, **{f"dies_in_{where}": [2, 12]}) as job:
        ends = check_gossip(job, [0, 1, 3])
    assert [moves(end) for end in ends] == [[(("n2",), ())]] * 3


def check_arrival(fork_server: ForkServer, kind: str) -> None:
    """A rank joins three that train. It begins with the weights of one of them, and the others keep theirs."""
    with start(fork_server, kind, 3, changes=ONCE) as job:
        job.wait_for([0, 1, 2], lambda line: line.get("steps", 0) >= 10, "step 10")
        place = job.arrive()
        ends = check_gossip(job, [0, 1, 2, place])
    begins = next(line for line in job.lines[place] if "begins" in line)
    held = {line["digest"] for founder in range(3) for line in job.lines[founder] if "attempt" in line}
    assert begins["begins"] >= 10 and begins["digest"] in held
    assert [moves(end) for end in ends[:3]] == [[((), ("n3",))]] * 3


def check_lacking(fork_server: ForkServer, kind: str) -> None:
    """A rank whose exchange fails makes the step alone, and goes on at the step of the others with its own weights.

    Where they wait for it in the next step, they make that one without it, and it leaves its batch out.
    """
    with start(fork_server, kind, 3, changes=ONCE, fails_at=[1, 7]) as job:
        job.wait_for([1], lambda line: "holds" in line, "step 7")
        # Both: a rank that has not begun the step that another one has begun leaves its batch out as well.
        job.wait_for([0, 2], lambda line: line.get("enters", 0) >= 8, "step 8")
        job.go_on(1)
        check_gossip(job, [0, 1, 2])
    steps = [{line["attempt"]: line for line in lines if "attempt" in line} for lines in job.lines]
    assert [attempt for attempt, line in steps[1].items() if not line["applied"]] in ([], [8])
    assert all(line["applied"] for each in (steps[0], steps[2]) for line in each.values())
    assert steps[0].keys() == steps[1].keys() == steps[2].keys()
    assert len({tuple(each[attempt]["steps"] for each in steps) for attempt in list(steps[0])[-STEPS:]}) == STEPS


@pytest.mark.parametrize(("kind", "where"), [("ring", "exchange"), ("low_precision", "exchange"), ("overlap", "step")])
def test_a_rank_dies_in_the_middle_of_a_step(fork_server: ForkServer, kind: str, where: str) -> None:
    check_death(fork_server, kind, where)


@pytest.mark.parametrize("kind", ["exponential", "low_precision"])
def test_a_rank_arrives(fork_server: ForkServer, kind: str) -> None:
    check_arrival(fork_server, kind)


@pytest.mark.parametrize("kind", ["all", "overlap"])
def test_a_rank_lacks_a_step(fork_server: ForkServer, kind: str) -> None:
    check_lacking(fork_server, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("event", ["exchange", "step", "arrival", "lacking", "stopped", "replaced"])
def test_all_kinds_outlive_all_events(fork_server: ForkServer, kind: str, event: str) -> None:
    if event in ("exchange", "step"):
        check_death(fork_server, kind, event)
    elif event == "arrival":
        check_arrival(fork_server, kind)
    elif event == "lacking":
        check_lacking(fork_server, kind)
    elif event == "stopped":
        with start(fork_server, kind, 4, changes=[1, 2, 2, 2], detect_s=4.0) as job:
            job.signal_at(0, 10, signal.SIGSTOP)
            job.wait_for([1, 2, 3], lambda line: line.get("steps", 0) >= 20, "step without the stopped rank")
            job.resume(0)
            ends = check_gossip(job, [1, 2, 3], returned=0)
        assert [moves(end) for end in ends[:3]] == [[(("n0",), ()), ((), ("n0",))]] * 3
    else:
        with start(fork_server, kind, 4, changes=[2, 2, 2, 2, 1]) as job:
            job.signal_at(0, 10, signal.SIGKILL)
            job.wait_for([1, 2, 3], lambda line: line.get("steps", 0) >= 20, "step without the lost rank")
            place = job.arrive()
            ends = check_gossip(job, [1, 2, 3, place])
        assert [moves(end) for end in ends[:3]] == [[(("n0",), ()), ((), ("n4",))]] * 3
