"""What the ranks of an elastic training wrote down, compared with what they should have done."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["COMMIT_EVERY", "NUM_IMAGES", "Run", "journals", "judge", "meetings"]

COMMIT_EVERY = 10
NUM_IMAGES = 1437


@dataclass
class Run:
    """What came of one run.

    Attributes:
        hung: it did not end by itself.
        step: of the accident.
        recovered_s: from the accident to the next step that a training made.
        meetings: how often ranks were started together.
        lost_steps: at each restart, steps made since the commit that was restored.
        problems: what went wrong; nothing in a good run.
    """

    scenario: str
    seed: int
    hosts: int
    hung: bool = False
    step: int = 0
    seconds: float = 0.0
    recovered_s: float | None = None
    meetings: int = 0
    lost_steps: list[int] = field(default_factory=list)
    repeated: int = 0
    accuracy: float | None = None
    problems: list[str] = field(default_factory=list)


def journals(folder: Path) -> list[list[dict[str, Any]]]:
    """What the ranks wrote, the first to begin at the beginning. The last line of one that was killed may be cut."""
    found = []
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().split("\n")[:-1]
        if lines:
            found.append([json.loads(line) for line in lines])
    return sorted(found, key=lambda journal: journal[0]["began"])


def meetings(found: list[list[dict[str, Any]]]) -> list[list[list[dict[str, Any]]]]:
    """The journals by the ranks that were started together, in time; those that got to their first step."""
    by_name: dict[str, list[list[dict[str, Any]]]] = {}
    for journal in found:
        if any("samples" in line for line in journal):
            by_name.setdefault(journal[0]["meeting"], []).append(journal)
    return list(by_name.values())


def judge(result: Run, found: list[list[dict[str, Any]]], epochs: int) -> None:
    """Compare what was done with what should have been; fills in `result`."""
    together = meetings(found)
    result.meetings = len(together)
    if not together:
        result.problems.append("no training took place")
        return
    starts = [next(line["step"] for line in each[0] if "restored" in line) for each in together]
    for each, start in zip(together[:-1], starts[1:], strict=True):
        done = max(line["step"] for journal in each for line in journal if "samples" in line)
        result.lost_steps.append(done - start)
        if not 0 <= done - start <= COMMIT_EVERY:
            result.problems.append(f"lost {done - start} steps")
    used = [Counter[int]() for _ in range(epochs)]
    sizes = [0] * epochs  # number of ranks at the end of the epoch
    for each, start, end in zip(together, starts, [*starts[1:], 10**9], strict=True):
        if len({journal[0]["rank"] for journal in each}) != each[0][0]["size"]:
            result.problems.append("a rank left no journal")
        for journal in each:
            for line in journal:
                if "samples" in line and start < line["step"] <= end:
                    used[line["epoch"]].update(line["samples"])
                    sizes[line["epoch"]] = journal[0]["size"]
    for epoch, counts in enumerate(used):
        missing, extra = NUM_IMAGES - len(counts), sum(counts.values()) - len(counts)
        result.repeated += extra
        if missing or extra >= sizes[epoch]:
            result.problems.append(f"epoch {epoch}: {missing} images left out, {extra} repeated")
    ends = [line["accuracy"] for journal in found for line in journal if "ended" in line]
    if not ends:
        result.problems.append("no rank came to the end")
    result.accuracy = ends[0] if ends else None
