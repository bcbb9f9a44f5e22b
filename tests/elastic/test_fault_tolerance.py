"""Ranks in processes that are killed or stopped in the middle of training: the others train on, in their processes."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest

import bagua
from tests.contract.members import CONTRIB_ALGORITHMS
from tests.elastic.fault_tolerant_rank import Job, start_job
from tests.fork_server import ForkServer

pytestmark = pytest.mark.process
ONCE = [1, 1, 1, 1]  # how often the members change, as each place sees it


def moves(end: dict[str, Any]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Who was lost and who came, change by change."""
    return [(each["lost"], each["joined"]) for each in end["changes"] if each["lost"] or each["joined"]]


def check_survivors(job: Job, places: list[int], lost: str) -> None:
    """They end with the same weights and optimizer state, after as many steps, and say who was lost."""
    ends = job.ends(places)
    first = ends[0]
    for end in ends:
        assert (end["steps"], end["digest"], end["moments"]) == (first["steps"], first["digest"], first["moments"])
        assert moves(end) == [((lost,), ())]
    for place in places:
        steps = [line for line in job.lines[place] if "attempt" in line]
        # One step is lost, or two where one rank was a step ahead of another.
        assert sum(not line["applied"] for line in steps) <= 2
        for before, now in itertools.pairwise(steps):
            assert before["digest"] != now["digest"] or not now["applied"]


@pytest.mark.parametrize(
    ("place", "algorithm", "options"),
    [
        (1, "gradient_allreduce", {}),
        (0, "bytegrad", {"codec": "int4"}),  # the first one also serves the store in which the groups meet
        (2, "power_sgd", {}),
        (1, "qadam", {"codec": "sign"}),
        (1, "gradient_allreduce", {"codec": "eden:bits=2"}),  # and a sum of the rows that are used
        (0, "one_bit_lamb", {}),
        (2, CONTRIB_ALGORITHMS["dion"](), {}),
        (1, bagua.algorithms.Warmup(5, "gradient_allreduce", "bytegrad"), {}),
        pytest.param(0, bagua.algorithms.Warmup(14, "gradient_allreduce", "power_sgd"), {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if isinstance(value, bagua.Algorithm) else None,
)
def test_a_killed_rank_is_left_out(
    fork_server: ForkServer, place: int, algorithm: Any, options: dict[str, Any]
) -> None:
    others = [each for each in range(3) if each != place]
    with start_job(fork_server, 3, algorithm=algorithm, options=options, changes=ONCE) as job:
        job.signal_at(place, 10, signal.SIGKILL)
        check_survivors(job, others, f"n{place}")


@pytest.mark.parametrize("algorithm", ["bytegrad", "local_sgd"])
def test_a_rank_with_a_defect_says_so_and_the_others_train_on(fork_server: ForkServer, algorithm: str) -> None:
    """It does not drop one step after the other, as if ranks had been lost."""
    given: dict[str, Any] = {}
    if algorithm == "local_sgd":
        given = {"options": {"communication_interval": 2}, "interval": [2, 0], "steps": 16}
    with start_job(fork_server, 3, algorithm=algorithm, changes=ONCE, breaks_at=[1, 10], **given) as job:
        job.wait_for([1], lambda line: "error" in line, "error")
        job.wait_for([0, 2], lambda line: "ended" in line, "end")
        ends = job.ends([0, 2])
    error = job.lines[1][-1]["error"]
    assert "TypeError: a defect; no lost rank is the cause, so this one ends" in error
    assert [moves(end) for end in ends] == [[(("n1",), ())]] * 2 and ends[0]["digest"] == ends[1]["digest"]


@pytest.mark.parametrize(
    ("place", "point", "algorithm", "leads", "late"),
    [
        # Nobody has the weights of rank 0 yet: they are lost with it.
        (0, "shake_hands", "gradient_allreduce", 1, []),
        (0, "_replicate", "local_sgd", 1, []),
        pytest.param(1, "shake_hands", "async", 0, [], marks=pytest.mark.slow),
        pytest.param(2, "_replicate", "bytegrad", 0, [], marks=pytest.mark.slow),
        # The others come to `distribute` before and after the loss, or all after it.
        (0, "shake_hands", "bytegrad", 1, [1]),
        (0, "shake_hands", "diloco", 1, [2]),
        (2, "shake_hands", "gradient_allreduce", 0, [0]),
        (1, "shake_hands", "power_sgd", 0, [0, 2]),
        # The others have them, or some of them: these give them to the rest.
        (0, "after _replicate", "low_precision_decentralized", None, []),
        pytest.param(0, "Engine", "diloco", None, [], marks=pytest.mark.slow),
        pytest.param(0, "after Engine", "bytegrad", 0, [], marks=pytest.mark.slow),
        pytest.param(1, "follow_membership", "power_sgd", 0, [], marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_lost_in_distribute(
    fork_server: ForkServer, place: int, point: str, algorithm: str, leads: int | None, late: list[int]
) -> None:
    """The others begin with the same weights: those of one rank, not a mix of two."""
    options = {"communication_interval": 2} if algorithm in ("local_sgd", "diloco") else {}
    others = [each for each in range(3) if each != place]
    with start_job(
        fork_server,
        3,
        algorithm=algorithm,
        options=options,
        # Who fetches weights may get them after a local step of the other rank, so here these change nothing.
        lr=0.0 if leads is None else None,
        dies_in_distribute=[place, point],
        late_in_distribute=late,
        changes=[int(each not in late) for each in range(3)],
        interval=[2, 0] if options else [1, 0],
        steps=8,
    ) as job:
        ends = job.ends(others)
        job.read_rest()
        own = [next(line["own"] for line in lines if "own" in line) for lines in job.lines]
        begins = [next(line for line in job.lines[each] if "begins" in line) for each in others]
    for each, end in zip(others, ends, strict=True):
        # A late rank trained with nobody before. On a busy machine another one may come too late to meet the lost rank.
        assert moves(end) in ([[]] if each in late else [[((f"n{place}",), ())], []])
    assert algorithm == "async" or ends[0]["digest"] == ends[1]["digest"]
    assert begins[0]["digest"] == begins[1]["digest"]
    assert begins[0]["digest"] in ([own[0], own[1]] if leads is None else [own[leads]])


def stop_and_wake(fork_server: ForkServer, **given: Any) -> None:
    """A stopped rank is left out, and joins again when it wakes. `given`: of `start_job`."""
    with start_job(fork_server, 3, detect_s=4.0, algorithm="bytegrad", changes=[1, 2, 2], **given) as job:
        job.signal_at(0, 10, signal.SIGSTOP)
        job.wait_for([1, 2], lambda line: line.get("steps", 0) >= 20, "step without the stopped rank")
        job.resume(0)
        ends = job.ends([0, 1, 2])
    assert len({end["digest"] for end in ends}) == 1
    assert moves(ends[1]) == moves(ends[2]) == [(("n0",), ()), ((), ("n0",))]


def test_a_stopped_rank_is_left_out_and_joins_again_when_it_wakes(fork_server: ForkServer) -> None:
    stop_and_wake(fork_server)


@pytest.mark.parametrize(
    "algorithm",
    ["gradient_allreduce", "power_sgd", "qadam", bagua.algorithms.Warmup(5, "gradient_allreduce", "bytegrad")],
    ids=lambda value: value.name if isinstance(value, bagua.algorithms.Warmup) else value,
)
def test_a_rank_that_arrives_trains_with_the_others(fork_server: ForkServer, algorithm: Any) -> None:
    with start_job(fork_server, 2, algorithm=algorithm, changes=ONCE) as job:
        job.wait_for([0, 1], lambda line: line.get("steps", 0) >= 10, "step 10")
        place = job.arrive()
        ends = job.ends([0, 1, place])
    assert len({end["digest"] for end in ends}) == 1 and ends[0]["moments"] == ends[2]["moments"]
    begins = next(line for line in job.lines[place] if "begins" in line)
    # Of both: one of them may have lacked the last step too, and got it together with the newcomer.
    steps = {line["steps"]: line["digest"] for place in (0, 1) for line in job.lines[place] if line.get("applied")}
    assert begins["begins"] >= 10
    assert begins["digest"] == steps[begins["begins"]]  # the weights of the others, not its own
    assert moves(ends[0]) == moves(ends[1]) == [((), ("n2",))]


@pytest.mark.parametrize("options", [{"codec": "int4"}, {"site": "paris"}], ids=["codec", "site"])
def test_a_rank_that_arrives_with_other_options_is_refused_and_disturbs_nobody(
    fork_server: ForkServer, options: dict[str, str]
) -> None:
    with start_job(
        fork_server, 2, algorithm="bytegrad", options_of_arrival=options, changes=[1, 1, 1], detect_s=4.0
    ) as job:
        job.wait_for([0, 1], lambda line: line.get("steps", 0) >= 10, "step 10")
        wrong = job.arrive()
        job.wait_for(
            [wrong], lambda line: "the job trains another module than this rank" in line.get("error", ""), "error"
        )
        job.kill(wrong)
        seen = max(line["steps"] for line in job.lines[0] if "steps" in line)
        job.wait_for([0, 1], lambda line: line.get("steps", 0) > seen + 5, "more steps")


def test_a_lost_rank_is_replaced(fork_server: ForkServer) -> None:
    with start_job(fork_server, 3, algorithm="bytegrad", options={"codec": "int4"}, changes=[2, 2, 2, 1]) as job:
        job.signal_at(0, 10, signal.SIGKILL)
        job.wait_for([1, 2], lambda line: line.get("steps", 0) >= 20, "step without the lost rank")
        place = job.arrive()
        ends = job.ends([1, 2, place])
    assert len({end["digest"] for end in ends}) == 1
    assert moves(ends[0]) == moves(ends[1]) == [(("n0",), ()), ((), ("n3",))]


def test_two_ranks_are_lost_one_after_the_other(fork_server: ForkServer) -> None:
    with start_job(fork_server, 4, algorithm="gradient_allreduce", tie_break=True, changes=[2, 2, 2, 2]) as job:
        job.signal_at(3, 5, signal.SIGKILL)
        job.signal_at(1, 20, signal.SIGKILL)
        ends = job.ends([0, 2])
    assert ends[0]["digest"] == ends[1]["digest"]
    assert moves(ends[0]) == moves(ends[1]) == [(("n3",), ()), (("n1",), ())]


def test_of_two_ranks_one_trains_on_alone(fork_server: ForkServer) -> None:
    with start_job(fork_server, 2, algorithm="gradient_allreduce", tie_break=True, changes=ONCE) as job:
        job.signal_at(1, 10, signal.SIGKILL)
        check_survivors(job, [0], "n1")


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "one_bit_lamb"])
def test_a_rank_that_lacks_a_step_that_counts_gets_it_from_the_others(fork_server: ForkServer, algorithm: str) -> None:
    with start_job(fork_server, 3, algorithm=algorithm, changes=ONCE, fails_at=[1, 7]) as job:
        job.wait_for([1], lambda line: "holds" in line, "step 7")
        job.wait_for([0, 2], lambda line: line.get("attempt") == 7, "step 7")  # they have applied it
        job.go_on(1)
        ends = job.ends([0, 1, 2])
    assert len({end["digest"] for end in ends}) == 1 and ends[0]["moments"] == ends[1]["moments"] == ends[2]["moments"]
    assert len({end["steps"] for end in ends}) == 1
    steps = [{line["attempt"]: line for line in lines if "attempt" in line} for lines in job.lines]
    assert steps[0][7]["applied"] and not steps[1][7]["applied"]
    assert steps[0].keys() == steps[1].keys() == steps[2].keys()
    for attempt in range(8, len(steps[0])):  # if the others had begun step 8 it is lost, and it skips its own
        assert len({each[attempt]["applied"] for each in steps}) == 1
        assert len({each[attempt]["digest"] for each in steps}) == 1
