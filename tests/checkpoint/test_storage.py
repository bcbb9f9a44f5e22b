"""`Shards` through torch's other storage: a file system of fsspec, and `async_save` beside training."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua
from tests.engine.training import distributed, equal, train, values
from tests.rank_pool import RankPool

OPTIONS: dict[str, dict[str, Any]] = {"bytegrad": {"codec": "int4"}, "local_sgd": {"communication_interval": 2}}


def made(algorithm: str) -> dict[str, Any]:
    model, optimizer = distributed(algorithm=algorithm, **OPTIONS[algorithm])
    return {"model": model, "optimizer": optimizer}


def go_on(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    train(state["model"], state["optimizer"], range(3, 6))
    return values(state["model"])


def through_fsspec(algorithm: str, url: str) -> bool:
    import torch.distributed.checkpoint as dcp

    try:
        from torch.distributed.checkpoint.fsspec_filesystem import (  # pyright: ignore
            FsspecReader,
            FsspecWriter,
        )
    except ImportError:  # torch before 2.15
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    state = made(algorithm)
    train(state["model"], state["optimizer"], range(3))
    dcp.save({"training": bagua.checkpoint.Shards(state)}, storage_writer=FsspecWriter(url))
    expected = go_on(state)
    state = made(algorithm)
    reader = FsspecReader(url)
    dcp.load({"training": bagua.checkpoint.Shards(state, reading=reader)}, storage_reader=reader)
    return equal(go_on(state), expected)


def beside_training(algorithm: str, place: str) -> tuple[bool, bool]:
    """The files are written after three further steps; they hold the state from before these."""
    import torch.distributed.checkpoint as dcp

    trained = threading.Event()

    class Late(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            assert trained.wait(120)
            return super().write_data(plan, planner)

    connections = dist.new_group(backend="gloo")
    state = made(algorithm)
    train(state["model"], state["optimizer"], range(3))
    shards = bagua.checkpoint.Shards(state)
    saving: Any = dcp.async_save({"training": shards}, storage_writer=Late(place), process_group=connections)
    expected = go_on(state)
    early = saving.done()
    trained.set()
    saving.result()
    state = made(algorithm)
    dcp.load({"training": bagua.checkpoint.Shards(state, reading=place)}, checkpoint_id=place)
    return early, equal(go_on(state), expected)


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_a_file_system_of_fsspec(pool: RankPool, tmp_path: Path, algorithm: str) -> None:
    pytest.importorskip("fsspec")
    assert pool.run(2, through_fsspec, algorithm, f"file://{tmp_path}/saved") == [True, True]


@pytest.mark.parametrize("algorithm", OPTIONS)
def test_saving_beside_training(pool: RankPool, tmp_path: Path, algorithm: str) -> None:
    assert pool.run(2, beside_training, algorithm, str(tmp_path)) == [(False, True)] * 2
