"""Ranks that train apart for some steps, in processes that are killed: no step of the others is lost."""

from __future__ import annotations

import itertools
import math
import signal
from typing import Any

import pytest

import bagua
from tests.elastic.fault_tolerant_rank import Job, start_job
from tests.elastic.slow_rank import train_and_tell_who_is_slow
from tests.elastic.test_fault_tolerance import moves
from tests.fork_server import ForkServer

pytestmark = pytest.mark.process
ONCE = [1, 1, 1, 1]
#: options, and (length, first end) of the intervals at whose ends weights are equal
PERIODIC: dict[str, tuple[dict[str, Any], list[int]]] = {
    "local_sgd": ({"communication_interval": 4}, [4, 0]),
    "diloco": ({"communication_interval": 4}, [4, 0]),
    "sparse_loco": ({"communication_interval": 4, "keep": 0.0}, [4, 0]),
    "zero_one_adam": ({}, [4, 1]),
}
DELAYED = {"communication_interval": 4, "fragments": 2, "delay": 1, "mixing": 0.0}


def start(fork_server: ForkServer, size: int, algorithm: Any, **job: Any) -> Any:
    """Ranks that train with a periodic algorithm."""
    options, interval = PERIODIC.get(algorithm, ({}, [1, 0]))
    given = {"options": options, "interval": interval, "changes": ONCE, "steps": 16, **job}
    return start_job(fork_server, size, algorithm=algorithm, **given)


def check_survivors(job: Job, places: list[int], lost: str | None, exact: bool = True) -> list[dict[str, Any]]:
    """They end with equal weights and outer state after as many steps, and have dropped none.

    Args:
        exact: whether none may have dropped one. Else a rank that took over another's place may have.
    """
    ends = job.ends(places)
    for end in ends:
        assert (end["steps"], end["digest"], end["outer"]) == (ends[0]["steps"], ends[0]["digest"], ends[0]["outer"])
        assert lost is None or moves(end) == [((lost,), ())]
    for place in places:
        steps = [line for line in job.lines[place] if "attempt" in line]
        dropped = sum(not line["applied"] for line in steps)
        assert dropped == 0 if exact else dropped <= 3
        for before, now in itertools.pairwise(steps):
            assert before["digest"] != now["digest"] or not now["applied"]
    return ends


@pytest.mark.parametrize("algorithm", PERIODIC)
def test_a_rank_that_is_killed_between_two_exchanges(fork_server: ForkServer, algorithm: str) -> None:
    with start(fork_server, 3, algorithm) as job:
        job.signal_at(0, 22, signal.SIGKILL)
        ends = check_survivors(job, [1, 2], "n0")
    assert not any(change["skipped"] for end in ends for change in end["changes"])


@pytest.mark.parametrize("algorithm", PERIODIC)
def test_a_rank_that_lacks_an_exchange_that_counts_gets_it_from_another(
    fork_server: ForkServer, algorithm: str
) -> None:
    """Place 1 holds where the mean has come but does not count here yet; place 0 applies it; place 2 dies."""
    end_of = 20 + PERIODIC[algorithm][1][1] - 1
    with start(fork_server, 3, algorithm, at_commit=[1, end_of, "exchanged", "hold"]) as job:
        job.wait_for([1], lambda line: "holds" in line, "exchange")
        job.wait_for([0, 2], lambda line: line.get("attempt", 0) >= end_of, "step that ends an interval")
        job.kill(2)
        job.wait_for([0], lambda line: line.get("attempt", 0) >= end_of, "step")
        job.go_on(1)
        check_survivors(job, [0, 1], "n2", exact=False)


@pytest.mark.parametrize(
    ("algorithm", "warm"),
    [
        ("diloco", 5),
        pytest.param("diloco", 0, marks=pytest.mark.slow),
        pytest.param("local_sgd", 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_arrives_gets_the_outer_state(fork_server: ForkServer, algorithm: str, warm: int) -> None:
    """Also after the switch of a warm-up, before which it begins."""
    warmup = bagua.algorithms.Warmup(warm, then=bagua.algorithms.get(algorithm, **PERIODIC[algorithm][0]))
    given = {"algorithm": warmup, "options": {}} if warm else {"algorithm": algorithm}
    with start(
        fork_server, 2, **{"options": PERIODIC[algorithm][0], **given, "interval": PERIODIC[algorithm][1]}
    ) as job:
        job.wait_for([0, 1], lambda line: line.get("steps", 0) >= 10, "step 10")
        place = job.arrive()
        ends = check_survivors(job, [0, 1, place], None)
    assert moves(ends[0]) == moves(ends[1]) == [((), ("n2",))]
    begins = next(line for line in job.lines[place] if "begins" in line)
    held = {line["digest"] for lines in job.lines[:2] for line in lines if "steps" in line}  # replicas differ
    assert begins["digest"] in held and begins["begins"] >= 10, "the weights of a rank that trained"


@pytest.mark.parametrize(
    ("algorithm", "max_wait_s"), [("diloco", 6.0), pytest.param("local_sgd", math.inf, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_slow_within_an_interval(fork_server: ForkServer, algorithm: str, max_wait_s: float) -> None:
    """It holds at the second of four local steps. The others name it; and wait, or give it up and let it join again."""
    gives_up = max_wait_s < math.inf
    changes = [1, 1, 1] if gives_up else [0, 0, 0]
    with start(
        fork_server, 3, algorithm, train=train_and_tell_who_is_slow, holds_at=[1, 21], changes=changes,
        detect_s=4.0, max_wait_s=max_wait_s, steps=28,
    ) as job:  # fmt: skip
        job.wait_for([0, 2], lambda line: line.get("slow") == "n1", "name of the slow rank")
        if gives_up:
            job.wait_for([0, 2], lambda line: line.get("steps", 0) >= 25, "step without the slow rank")
        assert not any(line.get("steps", 0) > 24 for line in job.lines[1])
        job.go_on(1)
        ends = check_survivors(job, [0, 1, 2] if not gives_up else [0, 2], None)
    assert {line["slow"] for place in (0, 2) for line in job.lines[place] if "slow" in line} == {"n1"}
    assert moves(ends[0])[:1] == ([(("n1",), ())] if gives_up else [])


def test_a_gradient_step_before_the_local_ones_is_lost_on_all(fork_server: ForkServer) -> None:
    """Steps are counted for all parameters at once: the lost one counts on no rank."""
    with start(fork_server, 3, "zero_one_adam", steps=24) as job:
        job.signal_at(1, 6, signal.SIGKILL)
        check_survivors(job, [0, 2], "n1", exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["launched", "exchanged", "committed"])
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("algorithm", PERIODIC)
def test_a_rank_that_dies_in_an_exchange(fork_server: ForkServer, algorithm: str, place: int, point: str) -> None:
    end_of = 20 + PERIODIC[algorithm][1][1] - 1
    with start(fork_server, 3, algorithm, at_commit=[place, end_of, point, "die"]) as job:
        check_survivors(job, [each for each in range(3) if each != place], f"n{place}", exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", [20, 21, 23])
@pytest.mark.parametrize("algorithm", PERIODIC)
def test_a_rank_that_dies_in_the_optimizers_step(fork_server: ForkServer, algorithm: str, attempt: int) -> None:
    with start(fork_server, 3, algorithm, dies_in_step=[1, attempt]) as job:
        check_survivors(job, [0, 2], "n1")


@pytest.mark.slow
@pytest.mark.parametrize("attempt", [20, 21, 22, 23])
def test_delayed_rounds_of_fragments(fork_server: ForkServer, attempt: int) -> None:
    with start(fork_server, 3, "diloco", options=DELAYED, dies_in_step=[1, attempt], bucket_bytes=4096) as job:
        ends = job.ends([0, 2])
    assert len({end["outer"] for end in ends}) == 1 and len({end["steps"] for end in ends}) == 1
    assert moves(ends[0]) == moves(ends[1]) == [(("n1",), ())]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", PERIODIC)
def test_a_lost_rank_is_replaced(fork_server: ForkServer, algorithm: str) -> None:
    with start(fork_server, 3, algorithm, changes=[2, 2, 2, 1]) as job:
        job.signal_at(0, 22, signal.SIGKILL)
        job.wait_for([1, 2], lambda line: line.get("steps", 0) >= 30, "step without the lost rank")
        place = job.arrive()
        ends = check_survivors(job, [1, 2, place], None, exact=False)
    assert moves(ends[0]) == moves(ends[1]) == [(("n0",), ()), ((), ("n3",))]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", PERIODIC)
def test_a_stopped_rank_joins_again_when_it_wakes(fork_server: ForkServer, algorithm: str) -> None:
    with start(fork_server, 3, algorithm, detect_s=4.0, changes=[1, 2, 2]) as job:
        job.signal_at(0, 22, signal.SIGSTOP)
        job.wait_for([1, 2], lambda line: line.get("steps", 0) >= 40, "step without the stopped rank")
        job.resume(0)
        ends = check_survivors(job, [0, 1, 2], None, exact=False)
    assert moves(ends[1]) == moves(ends[2]) == [(("n0",), ()), ((), ("n0",))]
