"""Ranks over NCCL that are killed, stopped or new. On a CPU a stand-in takes the place of NCCL."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from tests.elastic import test_fault_tolerant_periodic
from tests.elastic.fault_tolerant_rank import start_job
from tests.elastic.test_fault_tolerance import ONCE, check_survivors, moves, stop_and_wake
from tests.fork_server import ForkServer

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("place", "algorithm", "options"),
    [
        (1, "gradient_allreduce", {}),
        (0, "bytegrad", {"codec": "int4"}),
        pytest.param(2, "power_sgd", {}, marks=pytest.mark.slow),
        pytest.param(0, "qadam", {"codec": "sign"}, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_left_out(
    fork_server: ForkServer, device: torch.device, place: int, algorithm: str, options: dict[str, Any]
) -> None:
    others = [each for each in range(3) if each != place]
    with start_job(
        fork_server, 3, algorithm=algorithm, options=options, changes=ONCE, device=str(device), backend="nccl"
    ) as job:
        job.signal_at(place, 10, signal.SIGKILL)
        check_survivors(job, others, f"n{place}")


@pytest.mark.parametrize("algorithm", ["diloco", pytest.param("local_sgd", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_between_two_exchanges(
    fork_server: ForkServer, device: torch.device, algorithm: str
) -> None:
    with test_fault_tolerant_periodic.start(fork_server, 3, algorithm, device=str(device), backend="nccl") as job:
        job.signal_at(0, 22, signal.SIGKILL)
        test_fault_tolerant_periodic.check_survivors(job, [1, 2], "n0")


@pytest.mark.parametrize(
    "algorithm",
    ["low_precision_decentralized", "async", pytest.param("decentralized", marks=pytest.mark.slow)],
)
def test_a_killed_rank_is_left_out_of_what_its_peers_average(
    fork_server: ForkServer, device: torch.device, algorithm: str
) -> None:
    """Each trains with weights of its own, of which they take the mean in the end."""
    extra = {"rounds": 2, "until_told": True} if algorithm == "async" else {}
    given = {"algorithm": algorithm, "options": {"sync_interval_ms": 0} if extra else {}, "averages": True, **extra}
    with start_job(fork_server, 3, changes=ONCE, device=str(device), backend="nccl", **given) as job:
        job.signal_at(1, 10, signal.SIGKILL)
        ends = job.ends([0, 2])
    assert ends[0]["digest"] == ends[1]["digest"]
    assert [moves(end) for end in ends] == [[(("n1",), ())]] * 2


@pytest.mark.parametrize("algorithm", ["bytegrad", "gradient_allreduce"])
def test_a_rank_that_arrives_trains_with_the_others(
    fork_server: ForkServer, device: torch.device, algorithm: str
) -> None:
    with start_job(fork_server, 2, algorithm=algorithm, changes=ONCE, device=str(device), backend="nccl") as job:
        job.wait_for([0, 1], lambda line: line.get("steps", 0) >= 10, "step 10")
        place = job.arrive()
        ends = job.ends([0, 1, place])
    assert len({end["digest"] for end in ends}) == 1 and ends[0]["moments"] == ends[2]["moments"]
    assert moves(ends[0]) == moves(ends[1]) == [((), ("n2",))]


def test_a_stopped_rank_is_left_out_and_joins_again_when_it_wakes(
    fork_server: ForkServer, device: torch.device
) -> None:
    """Its kernels, or what stands for them, wait without an error until they are aborted."""
    stop_and_wake(fork_server, device=str(device), backend="nccl")
