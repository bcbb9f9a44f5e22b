"""The table "which algorithm?" of README: network, optimizer, algorithm, and what was measured of it."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.figures.results import Convergence, newest_complete
from benchmarks.figures.svg import percent

__all__ = ["advice"]


class _Row(NamedTuple):
    """One row.

    Attributes:
        network, optimizer, algorithm: in words.
        entrant, condition, setting: what the speed-up is of.
        configuration, note: what the loss is of.
        other: the setting of the loss, if it is not that of the speed-up.
    """

    network: str
    optimizer: str
    algorithm: str
    entrant: str
    condition: str
    setting: str
    configuration: str
    note: str = ""
    other: str = ""


_FAST, _SLOW = "1gbit/5ms", "100mbit/5ms"
_CALLED = {_FAST: "1 Gbit/s", _SLOW: "100 Mbit/s"}
_ROWS = (
    _Row("one machine, or over 25 Gbit/s", "any", "`gradient_allreduce`", "gradient_allreduce", _FAST, "",
         "gradient_allreduce", "exact"),
    _Row("1 to 25 Gbit/s", "any", "`bytegrad`", "bytegrad", _FAST, "", "bytegrad, adam", "Adam"),
    _Row("100 Mbit/s to 1 Gbit/s", "any", '`gradient_allreduce`, `codec="int4"`', "int4", _SLOW, "",
         "bytegrad int4 + feedback, adam", "Adam"),
    _Row("100 Mbit/s to 1 Gbit/s, large matrices", "SGD", "`power_sgd`", "power_sgd", _SLOW, "rank 8", "power_sgd",
         "SGD", "rank 4"),
    _Row("between sites (WAN), long runs", "any", "`diloco`", "diloco", _SLOW, "every 64 steps", "diloco",
         "SGD", "every 16 of 160 steps"),
)  # fmt: skip


def advice(runs: Convergence) -> str:
    """Five rows. Gains are those of the newest run with all of torch's hooks; losses of the text task."""
    lines = ["| network | optimizer | algorithm | speed-up over DDP | loss against DDP |", "|---|---|---|---|---|"]
    for row in _ROWS:
        speedup = newest_complete(row.condition).speedup(row.condition, row.entrant)
        gain = f"{speedup:.1f}x at {_CALLED[row.condition]}" + (f", {row.setting}" if row.setting else "")
        loss = percent(runs.row("char_lm", row.configuration)["difference"])
        loss = f"{loss} ({row.note})"
        if row.other:
            loss = f"not measured with {row.setting}; {row.other}: {loss}"
        lines.append(f"| {row.network} | {row.optimizer} | {row.algorithm} | {gain} | {loss} |")
    return "\n".join(lines) + "\n"
