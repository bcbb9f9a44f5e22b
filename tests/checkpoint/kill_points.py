"""Save again and again, killed at a later moment each time, and see what is found afterwards."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import bagua
from bagua.checkpoint import directory as written
from tests.forks import Fork, check_single_threaded

KEEP = 2


class Doom:
    """Kills the process when it is about to do something for the n-th time."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def strikes(self) -> bool:
        self.left -= 1
        return self.left < 0

    def watch(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if self.strikes():
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(owner, name, call)

    def watch_writes(self) -> None:
        real = written._Writer.write

        def write(writer: Any, data: Any) -> int:
            if self.strikes():
                real(writer, bytes(data)[: len(data) // 2])
                writer.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(writer, data)

        written._Writer.write = write  # pyright: ignore[reportAttributeAccessIssue]


def objects(step: int) -> dict[str, Any]:
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
    return {"model": model, "epoch": step, "more": torch.full((1000,), step)}


def writer(moment: int, work: Callable[[], object]) -> bool:
    """Do `work` in a fork that is killed at `moment`; whether it came to its end."""

    def child() -> None:
        doom = Doom(moment)
        for owner, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir")):
            doom.watch(owner, name)
        doom.watch_writes()
        work()

    check_single_threaded()
    return Fork(child).wait() == 0


def look(folder: Path) -> tuple[int, str]:
    """The step that is found, and what is wrong with it."""
    fresh = objects(-1)
    loaded = bagua.checkpoint.load(folder, fresh)
    if loaded is None:
        return 0, ""
    step, good = loaded.step, loaded.data["epoch"] == loaded.step
    good = good and all(bool((param == step).all()) for param in fresh["model"].parameters())
    good = good and bool((loaded.data["more"] == step).all())
    return step, "" if good else "other content"


def sweep(path: str, stride: int) -> list[tuple[int, int, str]]:
    """In a fresh process without a process group: kill writers at every `stride`-th moment.

    Returns:
        For each moment the last step that was complete before, the step found after, and what is wrong.
    """
    report: list[tuple[int, int, str]] = []
    with mock.patch.object(shutil, "_use_fd_functions", False):  # else unlinks are not seen
        for start in (0, 3):  # into an empty directory, and where old ones are removed at the end
            place = Path(path) / str(start)
            for step in range(1, start + 1):
                bagua.checkpoint.save(place, objects(step), step=step, keep=KEEP)
            for moment in range(0, 1000, stride):
                before, _ = look(place)
                done = writer(
                    moment, partial(bagua.checkpoint.save, place, objects(before + 1), step=before + 1, keep=KEEP)
                )
                after, wrong = look(place)
                report.append((before, after, wrong or ("" if after in (before, before + 1) else "out of nowhere")))
                if done:
                    break
    return report
