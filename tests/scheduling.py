"""Which worker of pytest-xdist runs which file, also after one was lost."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

__all__ = ["FileScheduling", "pytest_xdist_make_scheduler"]


class FileScheduling(LoadFileScheduling):
    """Files are given to workers in order, and the tests that a lost worker had left to the one that takes its place.

    xdist's own puts back all files of a lost worker: those that have ended, too, and the test that it was lost in.
    The new worker is given an ended file, runs nothing and is never given another, or is lost in the same test.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        work = self.assigned_work[node]
        left = [(file, name) for file, tests in work.items() for name, ended in tests.items() if not ended]
        kept = {file: {name: False for other, name in left[1:] if other == file} for file in work}
        self.assigned_work[node] = {file: tests for file, tests in kept.items() if tests}
        super().remove_node(node)
        return left[0][1] if left else None

    def _assign_work_unit(self, node: WorkerController) -> None:
        """What a worker is sent that is lost, but not yet known to be, comes back in `remove_node`."""
        with contextlib.suppress(OSError):
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        """A worker begins a test when it has another one or is told that there is none.

        One that takes the place of a lost one, and has not collected its tests yet, is asked for again when it has.
        """
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue and not node.shutting_down:
            node.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Any:
    """`--dist loadfile`, mended."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
