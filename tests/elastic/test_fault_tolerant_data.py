"""Each sample of an epoch counts once, although ranks are killed and join while it is trained on."""

from __future__ import annotations

import itertools
import signal
from collections import Counter, defaultdict
from typing import Any

import pytest

from bagua import elastic
from tests.elastic.data_rank import DECAY, GLOBAL_BATCH, NUM_SAMPLES, SEED, STEPS_PER_EPOCH, train_on_samples
from tests.elastic.fault_tolerant_rank import Job, start_job
from tests.fork_server import ForkServer

pytestmark = pytest.mark.process
Line = dict[str, Any]


def start(fork_server: ForkServer, size: int, algorithm: str, **job: Any) -> Any:
    """Ranks that train on samples."""
    return start_job(fork_server, size, train=train_on_samples, algorithm=algorithm, **job)


def uses(job: Job, place: int) -> list[Line]:
    """What a rank has been given for each step."""
    return [line for line in job.lines[place] if "uses" in line]


def counted(job: Job) -> list[Line]:
    """What was given for steps that count: a group's, but for those at which the next one begins."""
    lines = [line for place in range(len(job.lines)) for line in uses(job, place)]
    groups = sorted({line["group"] for line in lines})
    ends = {
        before: min(line["step"] for line in lines if line["group"] == after)
        for before, after in itertools.pairwise(groups)
    }
    return [line for line in lines if line["step"] < ends.get(line["group"], 10**9)]


def check_each_sample_once(job: Job, places: list[int]) -> list[Line]:
    """So it is in every epoch; what goes with the place in the data is that of the step, on all ranks at all times."""
    ends = job.ends(places)
    job.read_rest()
    for name in ("steps", "counter", "epochs", "number", "digest"):
        assert len({end[name] for end in ends}) == 1, name
    assert ends[0]["counter"] == ends[0]["steps"] == STEPS_PER_EPOCH * ends[0]["epochs"]
    assert ends[0]["number"] == ends[0]["epochs"]
    steps: defaultdict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in counted(job):
        assert line["counter"] == line["step"] and line["step"] // STEPS_PER_EPOCH == line["epoch"]
        assert line["lr"] == pytest.approx(1e-3 * DECAY ** line["step"])
        steps[line["epoch"], line["step"]].append(line)
    samples: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for (epoch, _), lines in steps.items():
        assert len(lines) == lines[0]["size"], "one rank's part is missing"
        for line in lines:
            samples[epoch].update(line["uses"])
    assert len(samples) == ends[0]["epochs"] and len(steps) == ends[0]["steps"]
    assert all(each == Counter(range(NUM_SAMPLES)) for each in samples.values())
    return ends


@pytest.mark.parametrize(
    ("algorithm", "place", "workers"), [("bytegrad", 0, 0), ("gradient_allreduce", 2, 0), ("gradient_allreduce", 1, 1)]
)
def test_a_rank_is_killed_and_another_one_joins(
    fork_server: ForkServer, algorithm: str, place: int, workers: int
) -> None:
    others = [each for each in range(3) if each != place]
    with start(fork_server, 3, algorithm, changes=[2, 2, 2, 1], workers=workers) as job:
        job.signal_at(place, 10, signal.SIGKILL)
        job.wait_for(others, lambda line: line.get("size") == 2, "step without the lost rank")
        came = job.arrive()
        ends = check_each_sample_once(job, [*others, came])
    assert ends[0]["resizes"] == ends[1]["resizes"] == [(3, 2), (2, 3)]
    assert ends[2]["resizes"] == [(2, 3)]
    assert next(line["source"] for line in job.lines[came] if "begins" in line) == "peers"
    assert uses(job, came)[0]["counter"] > 0


def test_a_rank_that_is_killed_before_it_applies_a_step(fork_server: ForkServer) -> None:
    """Its share is in the mean of the others already, or in none: they decide it alike."""
    with start(fork_server, 3, "gradient_allreduce", changes=[1, 1, 1], dies_in_step=[1, STEPS_PER_EPOCH + 3]) as job:
        check_each_sample_once(job, [0, 2])


@pytest.mark.parametrize("step", [STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH + 2])
def test_a_rank_that_lacks_a_step_gets_the_place_after_it(fork_server: ForkServer, step: int) -> None:
    """The first one is the last of an epoch: the others have begun the next epoch, and it has to follow them there."""
    with start(fork_server, 3, "gradient_allreduce", changes=[1, 1, 1], fails_at=[1, step]) as job:
        job.wait_for([1], lambda line: "holds" in line, "step")
        job.wait_for([0, 2], lambda line: line.get("attempt") == step + 1, "step")  # they have applied it
        job.go_on(1)
        check_each_sample_once(job, [0, 1, 2])
    assert step + 1 in [line["step"] for line in uses(job, 1)]


def test_ranks_that_train_apart_leave_out_only_the_share_of_the_lost_one(fork_server: ForkServer) -> None:
    """Others may be at different steps when it is lost; all end their epochs after as many steps."""
    options = {"communication_interval": 4}
    with start(fork_server, 3, "local_sgd", options=options, changes=[1, 1, 1]) as job:
        job.signal_at(1, 10, signal.SIGKILL)
        ends = job.ends([0, 2])
        job.read_rest()
    assert len({(end["steps"], end["counter"], end["epochs"]) for end in ends}) == 1
    assert ends[0]["counter"] == ends[0]["steps"] == STEPS_PER_EPOCH * ends[0]["epochs"]
    samples: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for place in (0, 2):
        assert [line["counter"] for line in uses(job, place)] == list(range(ends[0]["steps"]))
        for line in uses(job, place):
            samples[line["epoch"]].update(line["uses"])
    before = [{line["step"] for line in uses(job, place) if line["size"] == 3} for place in (0, 2)]
    assert before[0] == before[1], "the new division begins at the same step on both"
    for epoch, counts in samples.items():
        share = elastic.Sampler(
            range(NUM_SAMPLES), seed=SEED, global_batch_size=GLOBAL_BATCH, num_replicas=3, rank=1
        )  # fmt: skip
        share.set_epoch(epoch)
        steps = enumerate(share, epoch * STEPS_PER_EPOCH)
        of_the_lost = {index for step, batch in steps if step in before[0] for index in batch}
        assert counts == Counter(set(range(NUM_SAMPLES)) - of_the_lost)


@pytest.mark.parametrize("kill", [10, STEPS_PER_EPOCH - 1])
def test_gossip_counts_no_sample_twice(fork_server: ForkServer, kill: int) -> None:
    """The step in progress is made alone. A rank that has begun one fewer than the other leaves its share of it out."""
    with start(fork_server, 3, "decentralized", changes=[1, 1, 1]) as job:
        job.signal_at(1, kill, signal.SIGKILL)
        ends = job.ends([0, 2])
        job.read_rest()
    assert len({(end["steps"], end["counter"], end["epochs"]) for end in ends}) == 1
    assert ends[0]["counter"] == ends[0]["steps"] == STEPS_PER_EPOCH * ends[0]["epochs"]
    samples: defaultdict[int, Counter[int]] = defaultdict(Counter)
    skipped = 0
    for place in (0, 2):
        counters = [line["counter"] for line in uses(job, place)]
        assert counters == sorted(set(counters)), "each step once, in order"
        skipped += ends[0]["steps"] - len(counters)
        for line in uses(job, place):
            samples[line["epoch"]].update(line["uses"])
    assert skipped <= 1
    with_three = sum(line["size"] == 3 for line in uses(job, 0)) + skipped  # of these rank 1 was to have a share
    share = -(-GLOBAL_BATCH // 3)
    for counts in samples.values():
        assert max(counts.values()) == 1
    lost = NUM_SAMPLES * ends[0]["epochs"] - sum(map(len, samples.values()))
    assert lost <= (with_three + skipped) * share
