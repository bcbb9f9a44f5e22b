"""Files of unit tests run beside those that start processes, which wait for most of their time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import scheduling
from tests.scheduling import FileScheduling
from tests.tiers import starts_processes

HERE = Path(__file__).parent


class Worker:
    """What the scheduler uses of a worker; notes what it is sent."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.sent: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.sent += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


def run_all(scheduler: FileScheduling, workers: list[Any], names: list[str]) -> Iterator[tuple[int, str]]:
    """Workers, each in its turn, run a test; yields number and file."""
    begun = [0] * len(workers)
    while any(begin < len(worker.sent) for begin, worker in zip(begun, workers, strict=True)):
        for number, worker in enumerate(workers):
            if begun[number] < len(worker.sent):
                test = worker.sent[begun[number]]
                begun[number] += 1
                yield number, names[test].partition("::")[0]
                scheduler.mark_test_complete(worker, test)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FileScheduling:
    """For four workers; files whose names begin with p start processes."""
    monkeypatch.setattr(scheduling, "starts_processes", lambda path: path.name.startswith("p"))
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    option = SimpleNamespace(loadscopereorder=False)
    values = {"tx": ["4*popen"], "numprocesses": 4}
    config = SimpleNamespace(option=option, rootpath=HERE, getvalue=values.get, hook=None)
    return FileScheduling(config, None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kinds", ["uuuuuuuuuuuupppppppppppp", "pppppppppppppppppppppppu", "uuuuuuuuuuuuuuuu"])
def test_the_fourth_worker_runs_unit_tests_as_long_as_there_are_any(scheduler: FileScheduling, kinds: str) -> None:
    names = [f"{kind}{number:02}.py::test_{each}" for number, kind in enumerate(kinds) for each in range(3)]
    workers: list[Any] = [Worker(number) for number in range(4)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, names)
    scheduler.schedule()
    found = list(run_all(scheduler, workers, names))
    assert sorted(file for _, file in found) == sorted(name.partition("::")[0] for name in names), "each test once"
    assert all(worker.shutting_down for worker in workers)
    order = {number: [file[0] for which, file in found if which == number] for number in range(4)}
    assert order[3] == sorted(order[3], reverse=True), "unit tests first"
    assert all(order[number] == sorted(order[number]) for number in range(3)), "processes first"
    if len(set(kinds)) == 2:
        assert order[3][0] == "u" and all(order[number][0] == "p" for number in range(3))
    assert all(order.values()), "all have work"


def test_long_files_are_begun_first(scheduler: FileScheduling, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"p{number}.py::test" for number in range(9)]
    monkeypatch.setattr(scheduling, "LONG", ("p8.py", "p7.py"))
    workers: list[Any] = [Worker(number) for number in range(4)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, names)
    scheduler.schedule()
    assert [worker.sent[0] for worker in workers[:3]] == [8, 7, 0]
    assert sorted(file for _, file in run_all(scheduler, workers, names)) == [f"p{number}.py" for number in range(9)]


def test_long_files_exist() -> None:
    assert all(starts_processes(HERE.parent / file) for file in scheduling.LONG)


def test_files_are_known_by_their_text() -> None:
    assert starts_processes(HERE / "test_lost_workers.py"), "a mark of the file"
    assert starts_processes(HERE / "test_tiers.py"), "a mark of a test"
    assert starts_processes(HERE / "algorithms" / "test_empty_parameters.py"), "a test with the pool of ranks"
    assert starts_processes(HERE / "examples" / "test_demo.py"), "a folder"
    assert not starts_processes(HERE / "algorithms" / "test_diloco.py")
    assert not starts_processes(Path("/elsewhere/test_lost_workers.py"))
