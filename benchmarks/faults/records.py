"""The journals of all ranks of a job, read while they grow."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Journals", "Process", "Step", "read"]


@dataclass(frozen=True, slots=True)
class Step:
    """One attempt of one rank at a step. Times are in seconds, of one clock for all hosts.

    Attributes:
        step: steps that counted before it.
        applied: it counts itself.
        size: ranks that took part.
        digest: of the weights after it.
    """

    step: int
    begin: float
    end: float
    rank: int
    size: int
    applied: bool
    digest: int


@dataclass
class Process:
    """What one process of a rank has written.

    Attributes:
        started, ready, joined: when it was started, could train, and took part; the last two None before that.
        changes: of the members; `begin` is when training went on: that of the step that followed, or within a step.
        resources: threads, descriptors and memory now and then, of the rank and its launcher.
        keys: numbers of keys in the store in which groups met.
        losses: on text that is not trained on, by the number of steps completed.
        finished: its last line; empty before.
    """

    host: int
    pid: int
    started: float
    ready: float | None = None
    joined: float | None = None
    steps: list[Step] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    keys: list[dict[str, Any]] = field(default_factory=list)
    state_bytes: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    finished: dict[str, Any] = field(default_factory=dict)

    def add(self, line: dict[str, Any]) -> None:
        """Take in a line."""
        if "applied" in line:
            self.steps.append(Step(**line))
        elif "ready" in line:
            self.ready = line["ready"]
        elif "joined" in line:
            self.joined = line["joined"]
        elif "change" in line:
            self.changes.append({**line["change"], "begin": line["begin"]})
        elif "resources" in line:
            self.resources.append(line)
        elif "keys" in line:
            self.keys.append(line)
        elif "state_bytes" in line:
            self.state_bytes = line["state_bytes"]
        elif "held_out" in line:
            self.losses[line["after"]] = line["held_out"]
        elif "finished" in line:
            self.finished = line

    @property
    def trained(self) -> list[Step]:
        """Steps that count."""
        return [each for each in self.steps if each.applied]


class Journals:
    """All journals of a folder.

    Args:
        folder: where the ranks write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._processes: dict[Path, Process] = {}

    def update(self) -> list[Process]:
        """Read what is new. A line that is cut off is left for later: its process may be writing it, or was killed.

        Returns:
            all processes, in the order in which they were started.
        """
        for path in self._folder.glob("host*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            for line in filter(None, whole.split(b"\n")):
                facts = json.loads(line)
                if path not in self._processes:
                    self._processes[path] = Process(facts["host"], facts["pid"], facts["started"])
                else:
                    self._processes[path].add(facts)
            self._read[path] = self._read.get(path, 0) + (len(whole) + 1 if whole else 0)
        return sorted(self._processes.values(), key=lambda each: each.started)


def read(folder: Path) -> list[Process]:
    """Return the processes of a job that has ended."""
    return Journals(folder).update()
