"""A rank that joins a training with a gradient scaler multiplies its first loss by the scale of the others."""

from __future__ import annotations

import signal

import pytest

from tests.elastic.fault_tolerant_rank import start_job
from tests.elastic.scaled_rank import GROWTH, train_scaled
from tests.fork_server import ForkServer

pytestmark = pytest.mark.process


@pytest.mark.parametrize("algorithm", ["bytegrad", pytest.param("local_sgd", marks=pytest.mark.slow)])
def test_a_rank_is_killed_and_another_one_arrives(fork_server: ForkServer, algorithm: str) -> None:
    options = {"communication_interval": 4} if algorithm == "local_sgd" else {}
    steps = 12 if options else 8
    with start_job(
        fork_server, 3, train=train_scaled, algorithm=algorithm, options=options, changes=[2, 2, 2, 1], steps=steps
    ) as job:
        job.signal_at(2, 7, signal.SIGKILL)
        job.wait_for([0, 1], lambda line: line.get("steps", 0) >= 14, "step 14")
        place = job.arrive()
        ends = job.ends([0, 1, place])
    first = next(line for line in job.lines[place] if "used" in line)
    assert first["used"] >= 2.0 ** (14 // GROWTH - 1), "not that with which it was made"
    if not options:
        assert len({(end["digest"], end["steps"], str(end["state"])) for end in ends}) == 1
        assert ends[0]["state"]["scale"] == 2.0 ** (ends[0]["steps"] // GROWTH)
        assert ends[0]["state"]["_growth_tracker"] == ends[0]["steps"] % GROWTH
