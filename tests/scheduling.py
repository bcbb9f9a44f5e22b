"""Which worker of pytest-xdist runs which file, also after one was lost."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.tiers import starts_processes

__all__ = ["FileScheduling", "pytest_xdist_make_scheduler"]

UNIT_WORKERS = 4  # one in so many workers prefers files that start no process
#: Files that take longest, all of them with processes: begun late, one of them would run alone at the end.
LONG = (
    "tests/parity/test_parity.py",
    "tests/launch/test_fork_server.py",
    "tests/launch/test_shutdown.py",
    "tests/examples/test_demo.py",
)


class FileScheduling(LoadFileScheduling):
    """Files are given to workers in order, and the tests that a lost worker had left to the one that takes its place.

    Tests that start processes wait for most of their time, and unit tests compute. So every fourth worker is given
    files of unit tests as long as there are any, and the others files that start processes: the processors are busy
    from the beginning to the end.

    xdist's own puts back all files of a lost worker: those that have ended, too, and the test that it was lost in.
    The new worker is given an ended file, runs nothing and is never given another, or is lost in the same test.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._kinds: dict[str, bool] = {}

    def remove_node(self, node: WorkerController) -> str | None:
        work = self.assigned_work[node]
        left = [(file, name) for file, tests in work.items() for name, ended in tests.items() if not ended]
        kept = {file: {name: False for other, name in left[1:] if other == file} for file in work}
        self.assigned_work[node] = {file: tests for file, tests in kept.items() if tests}
        super().remove_node(node)
        return left[0][1] if left else None

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give a worker the first file of the kind that it prefers, or the first of all; but long ones before others.

        What a worker is sent that is lost, but not yet known to be, comes back in `remove_node`.
        """
        for scope in [*(each for each in LONG if each in self.workqueue), *self.workqueue]:
            if self._has_processes(scope) != self._prefers_unit_tests(node):
                self.workqueue.move_to_end(scope, last=False)
                break
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

    def _prefers_unit_tests(self, node: WorkerController) -> bool:
        number = node.gateway.id.removeprefix("gw")
        return number.isdigit() and int(number) % UNIT_WORKERS == UNIT_WORKERS - 1

    def _has_processes(self, scope: str) -> bool:
        if scope not in self._kinds:
            path = self.config.rootpath / scope.partition("::")[0]
            self._kinds[scope] = path.is_file() and starts_processes(path)
        return self._kinds[scope]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Any:
    """`--dist loadfile`, mended."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
