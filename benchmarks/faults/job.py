"""A training on the hosts of an emulated cluster, and what is done to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from bagua.lab import Cluster, Host, Link
from benchmarks.faults.records import Journals, Process, Step
from benchmarks.faults.systems import ROOT, Settings, command, environment, servers

__all__ = ["Job", "Stuck"]

_LOOK_S = 0.1
_KILL = "import os, sys, time; print(time.monotonic(), flush=True); os.kill(int(sys.argv[1]), int(sys.argv[2]))"
_COUNT = "import os; print(sum(each.isdigit() for each in os.listdir('/proc')))"


class Stuck(RuntimeError):
    """What was waited for did not come about; says what."""


class Job:
    """A context manager: its end ends all processes and removes the hosts.

    Args:
        settings: what trains.
        limit_s: for everything that is waited for.

    Raises:
        LabError: this machine cannot emulate the hosts.
    """

    def __init__(self, settings: Settings, limit_s: float = 120.0) -> None:
        self.settings, self.limit_s = settings, limit_s
        self.folder = Path(tempfile.mkdtemp(prefix="bagua-faults-"))
        self.cluster = Cluster(
            settings.hosts, Link(settings.bandwidth), mode="namespaces", wire="relay", seed=settings.seed
        )
        self.journals = Journals(self.folder)
        self.processes: dict[int, subprocess.Popen[Any]] = {}
        self.up: dict[int, list[list[float]]] = {index: [] for index in range(settings.hosts)}  # [from, until] of each
        self._servers: list[subprocess.Popen[Any]] = []
        self._starts = 0

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Of the cluster."""
        return self.cluster.hosts

    def __enter__(self) -> Job:
        try:
            for words in servers(self.settings, self.hosts):
                self._servers.append(self._popen(0, words, "server"))
            for index in range(self.settings.hosts):
                self.start(index)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        self.cluster.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- hosts ---------------------------------------------------------------------------------------------------

    def start(self, index: int) -> float:
        """Start the launcher of a host; return when."""
        now = time.monotonic()
        words = command(self.settings, self.hosts, index, self.folder)
        self.processes[index] = self._popen(index, words, "launcher")
        self.up[index].append([now, float("inf")])
        return now

    def _popen(self, index: int, words: list[str], name: str) -> subprocess.Popen[Any]:
        self._starts += 1
        env = environment(self.settings, self.hosts)
        with (self.folder / f"host{index}-{name}-{self._starts}.txt").open("w") as out:
            return self.hosts[index].popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=str(ROOT)
            )

    def kill_host(self, index: int) -> float:
        """SIGKILL to all its processes; its kernel closes their connections. Returns when."""
        now = time.monotonic()
        self.hosts[index].kill()
        self.processes.pop(index).wait(20)
        self.up[index][-1][1] = now
        return now

    def signal_rank(self, index: int, number: int) -> float:
        """Send a signal to the rank of a host; return when."""
        pid = str(self.newest(index).pid)
        done = self.hosts[index].run([sys.executable, "-I", "-S", "-c", _KILL, pid, str(number)], timeout=60)
        if done.returncode:
            raise Stuck(f"host {index}: no signal could be sent to the rank: {done.stderr}")
        return float(done.stdout)

    # -- what the ranks do ---------------------------------------------------------------------------------------

    def newest(self, index: int) -> Process:
        """The process of a host that was started last.

        Raises:
            Stuck: there is none.
        """
        found = [each for each in self.journals.update() if each.host == index]
        if not found:
            raise Stuck(f"host {index} has not started a rank")
        return found[-1]

    def wait(self, found: Callable[[], object], what: str, limit_s: float | None = None) -> None:
        """Look again and again.

        Raises:
            Stuck: it did not come about in time, or no launcher runs any more.
        """
        deadline = time.monotonic() + (limit_s or self.limit_s)
        while not found():
            if time.monotonic() > deadline:
                raise Stuck(f"{what}: not within {limit_s or self.limit_s:g} s")
            if all(process.poll() is not None for process in self.processes.values()):
                raise Stuck(f"{what}: all launchers have ended")
            time.sleep(_LOOK_S)

    def await_steps(self, hosts: Iterable[int], after: float, count: int = 3, size: int | None = None) -> None:
        """Wait until each of these hosts has made some steps that began later, with `size` ranks if it is given."""
        wanted = list(hosts)

        def found() -> bool:
            made = dict.fromkeys(wanted, 0)
            for process in self.journals.update():
                if process.host in made:
                    made[process.host] += sum(
                        each.begin > after and (size is None or each.size == size) for each in process.trained
                    )
            return all(value >= count for value in made.values())

        self.wait(found, f"{count} steps of hosts {wanted}" + ("" if size is None else f" with {size} ranks"))

    def await_everyone(self, after: float) -> None:
        """Wait until all hosts train with each other, in steps that began later."""
        self.await_steps(range(self.settings.hosts), after, size=self.settings.hosts)

    def last_step(self) -> Step:
        """The newest one that counts.

        Raises:
            Stuck: there is none.
        """
        found = [process.trained[-1] for process in self.journals.update() if process.trained]
        if not found:
            raise Stuck("no step was made")
        return max(found, key=lambda each: each.end)

    # -- the end -------------------------------------------------------------------------------------------------

    def stop(self, after: int = 10) -> dict[int, int]:
        """Let the training end some steps from now.

        Returns:
            exit codes of the launchers by host.

        Raises:
            Stuck: it does not end.
        """
        self.stop_at(self.last_step().step + after)
        return self.await_end()

    def stop_at(self, step: int) -> None:
        """Let the training end after so many steps."""
        part = self.folder / "stop.part"
        part.write_text(str(step))
        part.replace(self.folder / "stop")

    def await_end(self) -> dict[int, int]:
        """Wait for the launchers; return their exit codes."""
        deadline = time.monotonic() + self.limit_s
        codes: dict[int, int] = {}
        for index, process in self.processes.items():
            try:
                codes[index] = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Stuck(f"host {index} has not ended within {self.limit_s:g} s") from None
        return codes

    def left_over(self) -> dict[int, int]:
        """Processes on each host besides the one that holds its namespaces; 0 when all have ended."""
        shared = os.path.exists(f"/proc/{os.getpid()}") and self._count(0) > 100  # /proc is the machine's
        return {} if shared else {host.index: self._count(host.index) - 2 for host in self.hosts}

    def _count(self, index: int) -> int:
        servers_here = sum(each.poll() is None for each in self._servers) if index == 0 else 0
        done = self.hosts[index].run([sys.executable, "-I", "-S", "-c", _COUNT], timeout=60)
        return int(done.stdout) - 2 * servers_here

    def texts(self, index: int | None = None) -> str:
        """What the launchers and ranks have written, of one host or all."""
        pattern = "host*.txt" if index is None else f"host{index}-*.txt"
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob(pattern)))
