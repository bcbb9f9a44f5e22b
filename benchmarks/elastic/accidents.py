"""What happens to a training that runs: ranks and hosts that are killed, hosts that come back."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua.lab import Cluster
from benchmarks.elastic.judge import journals, meetings

__all__ = ["SCENARIOS", "Stage", "now_at"]

_LOOK_S = 0.25  # between two looks at the journals


def now_at(folder: Path) -> tuple[int, float]:
    """The newest meeting's last step, and when that meeting began."""
    together = meetings(journals(folder))
    if not together:
        return 0, 0.0
    last = together[-1]
    return max(line.get("step", 0) for journal in last for line in journal), last[0][0]["began"]


@dataclass
class Stage:
    """A training that runs, for the scenarios to meddle with."""

    cluster: Cluster
    folder: Path
    start: Callable[[int], subprocess.Popen[Any]]
    processes: dict[int, subprocess.Popen[Any]]
    rng: random.Random
    deadline: float

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Look again and again.

        Raises:
            TimeoutError: it did not come about before the deadline, or the training has ended.
        """
        while not condition():
            if time.monotonic() > self.deadline or all(p.poll() is not None for p in self.processes.values()):
                raise TimeoutError(what)
            time.sleep(_LOOK_S)

    def kill_host(self, index: int) -> None:
        """All its processes at once."""
        self.cluster.hosts[index].kill()
        self.processes.pop(index).wait(20)


def kill_rank(stage: Stage) -> None:
    """SIGKILL to one rank."""
    newest = meetings(journals(stage.folder))[-1]
    journal = stage.rng.choice(newest)[0]
    code = f"import os; os.kill({journal['pid']}, 9)"
    stage.cluster.hosts[journal["host"]].run([sys.executable, "-I", "-S", "-c", code], timeout=20)


def kill_host(stage: Stage) -> None:
    """A host that does not serve the rendezvous."""
    stage.kill_host(stage.rng.randrange(1, len(stage.cluster.hosts)))


def kill_host_0(stage: Stage) -> None:
    """The host that serves the rendezvous, and has rank 0."""
    stage.kill_host(0)


def host_returns(stage: Stage) -> None:
    """4 -> 3 -> 4: any host, the first one too; it comes back when the others have gone on for a while."""
    index = stage.rng.randrange(len(stage.cluster.hosts))
    _, before = now_at(stage.folder)
    stage.kill_host(index)
    stage.wait_until(lambda: now_at(stage.folder)[1] > before, "the others did not go on")
    time.sleep(stage.rng.uniform(0, 2))
    stage.processes[index] = stage.start(index)
    stage.wait_until(
        lambda: len(meetings(journals(stage.folder))[-1]) == len(stage.cluster.hosts), "the host was not taken in"
    )


SCENARIOS: dict[str, tuple[Callable[[Stage], None], int]] = {  # and the number of hosts
    "kill-rank": (kill_rank, 3),
    "kill-host": (kill_host, 3),
    "kill-host-0": (kill_host_0, 3),
    "host-returns": (host_returns, 4),
}
