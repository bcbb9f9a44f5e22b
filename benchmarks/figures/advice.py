"""The table "which algorithm?" of README: network, optimizer, algorithm, and what was measured of it."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.figures.pairs import DILOCO, EDEN, SUITE
from benchmarks.figures.results import timed
from benchmarks.figures.suite import Suite
from benchmarks.figures.svg import percent

__all__ = ["advice", "worst_loss"]


class _Row(NamedTuple):
    """One row.

    Attributes:
        network, optimizer, algorithm, why: in words.
        entrant, condition: what the speed-up is of.
    """

    network: str
    optimizer: str
    algorithm: str
    why: str
    entrant: str
    condition: str


_FAST, _SLOW = "1gbit/5ms", "100mbit/5ms"
_CALLED = {_FAST: "1 Gbit/s", _SLOW: "100 Mbit/s"}
_ROWS = (
    _Row("one machine, or over 25 Gbit/s", "any", "`gradient_allreduce`", "little to gain, and it is exact",
         "gradient_allreduce", _FAST),
    _Row("1 to 25 Gbit/s", "any", "`bytegrad`", "a quarter of the bytes, cheap to encode", "bytegrad", _FAST),
    _Row("100 Mbit/s to 1 Gbit/s", "any", '`gradient_allreduce`, `codec="eden:bits=2"`',
         "a fifteenth of the bytes; where CPUs are busy `int4`", EDEN, _SLOW),
    _Row("between sites (WAN)", "any", "`diloco`", "a round of 3 bits every 3 steps: few bytes, and few latencies",
         DILOCO, _SLOW),
)  # fmt: skip


def worst_loss(learnt: Suite, entrant: str) -> str:
    """Return by how much the loss of an entrant differs from the baseline's on the task where it lost most."""
    found = SUITE[entrant]
    value, tasks = learnt.worst(found.setting, found.families)
    return f"{percent(value)} ({tasks} tasks)"


def advice(learnt: Suite, with_reasons: bool = False) -> str:
    """Four rows, with a column of reasons if asked for."""
    heads = ["network", "optimizer", "algorithm", *(["why"] if with_reasons else []), "speed-up over DDP"]
    lines = [f"| {' | '.join(heads)} | loss against DDP, worst task (+ is worse) |", "|---" * (len(heads) + 1) + "|"]
    for row in _ROWS:
        speedup = timed(row.condition, row.entrant).speedup(row.condition, row.entrant)
        exact = row.entrant not in SUITE
        cells = [row.network, row.optimizer, row.algorithm, *([row.why] if with_reasons else [])]
        cells.append(f"{speedup:.1f}x at {_CALLED[row.condition]}")
        cells.append("0.0 % (exact)" if exact else worst_loss(learnt, row.entrant))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
