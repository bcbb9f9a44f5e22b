"""A rank that is stopped, the one that serves the store too: every wait of the others ends, and names it."""

from __future__ import annotations

import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import bagua
from bagua.comm.team import Team
from tests.engine.training import distributed, train
from tests.ports import free_port
from tests.rank_pool import RankPool

PHASES = ["handshake", "connecting", "first weights", "first backward", "training", "average", "checkpoint"]


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_in_backward(model: torch.nn.Module) -> None:
    def hook(grad: torch.Tensor) -> torch.Tensor:
        stop()
        return grad

    model.get_parameter("first.weight").register_hook(hook)


def part_of_a_training(stops: bool, phase: str, algorithm: str, options: dict, folder: str) -> None:
    if stops and phase == "handshake":
        stop()
    connect = Team.open

    def opened(*args, **kw):
        Team.open = connect
        if phase == "connecting":
            stop()
        made = connect(*args, **kw)
        if phase == "first weights":
            stop()
        return made

    if stops and phase in ("connecting", "first weights"):
        Team.open = opened
    model, optimizer = distributed(algorithm=algorithm, bucket_bytes=100, **options)
    if stops and phase == "first backward":
        stop_in_backward(model)
    train(model, optimizer, range(2))
    if stops and phase == "training":
        stop_in_backward(model)
    train(model, optimizer, range(2, 5))
    if stops and phase in ("average", "checkpoint"):
        stop()
    if phase == "average":
        bagua.average_parameters(model)
    if phase == "checkpoint":
        bagua.checkpoint.save(folder, {"model": model, "optimizer": optimizer}, step=5)


def train_with(stopped: int, phase: str, algorithm: str, options: dict, port: int, folder: str, timeout_s: float):
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    bagua.init_process_group(
        init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        part_of_a_training(rank == stopped, phase, algorithm, options, folder)
    except bagua.CommunicationError as error:
        return str(error)
    finally:
        bagua.destroy_process_group()
    return "no error"


def check(
    pool: RankPool, stopped: int, phase: str, algorithm: str = "gradient_allreduce", size: int = 3, **options: object
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        messages = pool.run(
            *(size, train_with, stopped, phase, algorithm, options, free_port(), str(Path(folder))),
            *(6.0,),  # the ranks meet within it, too
            init=False,
            stops=[stopped],
            timeout_s=90,
        )
    for rank, message in enumerate(messages):
        assert message != "no error", f"rank {rank}"
        assert rank == stopped or f"rank {stopped}" in message, message


@pytest.mark.parametrize("phase", ["first weights", "first backward"])
def test_the_rank_that_serves_the_store_is_stopped(pool: RankPool, phase: str) -> None:
    check(pool, 0, phase)


def test_another_rank_is_stopped_before_an_average(pool: RankPool) -> None:
    check(pool, 1, "average", "decentralized")


CLASSES = {  # one algorithm of each class
    "gradient_allreduce": {},
    "bytegrad": {},
    "power_sgd": {},
    "decentralized": {},
    "low_precision_decentralized": {},
    "local_sgd": {"communication_interval": 2},
    "diloco": {"communication_interval": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", CLASSES)
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_is_stopped(pool: RankPool, phase: str, stopped: int, algorithm: str) -> None:
    if phase == "average" and algorithm in ("gradient_allreduce", "bytegrad", "power_sgd"):
        phase = "checkpoint"  # their replicas are equal: nothing is averaged
    check(pool, stopped, phase, algorithm, **CLASSES[algorithm])
