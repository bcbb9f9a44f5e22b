"""The table "which algorithm?" of README: network, optimizer, algorithm, and what was measured of it."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.figures.results import Convergence, Tradeoff, newest, newest_complete
from benchmarks.figures.svg import percent

__all__ = ["advice"]


class _Row(NamedTuple):
    """One row.

    Attributes:
        network, optimizer, algorithm: in words.
        entrant, condition: what the speed-up is of.
        configuration, note: what the loss is of: the same setting.
    """

    network: str
    optimizer: str
    algorithm: str
    entrant: str
    condition: str
    configuration: str
    note: str = ""


_FAST, _SLOW = "1gbit/5ms", "100mbit/5ms"
_CALLED = {_FAST: "1 Gbit/s", _SLOW: "100 Mbit/s"}
_ROWS = (
    _Row("one machine, or over 25 Gbit/s", "any", "`gradient_allreduce`", "gradient_allreduce", _FAST,
         "gradient_allreduce", "exact"),
    _Row("1 to 25 Gbit/s", "any", "`bytegrad`", "bytegrad", _FAST, "bytegrad, adam", "Adam"),
    _Row("100 Mbit/s to 1 Gbit/s", "any", '`gradient_allreduce`, `codec="int4"`', "int4", _SLOW,
         "bytegrad int4 + feedback, adam", "Adam"),
    _Row("100 Mbit/s to 1 Gbit/s, large matrices", "SGD", "`power_sgd`, `rank=4`", "power_sgd:rank=4", _SLOW,
         "power_sgd", "SGD"),
    _Row("between sites (WAN), long runs", "SGD", '`diloco`, `communication_interval=16`, `codec="identity"`',
         "diloco:communication_interval=16,delay=0", _SLOW, "diloco", "SGD"),
)  # fmt: skip


def advice(runs: Convergence) -> str:
    """Five rows. Losses are those of the text task.

    Gains are those of the newest run with all of torch's hooks, or, with options, of the newest run for this table.
    """
    with_options = Tradeoff(newest("advice", "tradeoff.json"))
    lines = ["| network | optimizer | algorithm | speed-up over DDP | loss against DDP |", "|---|---|---|---|---|"]
    for row in _ROWS:
        times = with_options if ":" in row.entrant else newest_complete(row.condition)
        speedup = times.speedup(row.condition, row.entrant)
        gain = f"{speedup:.1f}x at {_CALLED[row.condition]}"
        loss = percent(runs.row("char_lm", row.configuration)["difference"])
        loss = f"{loss} ({row.note})"
        lines.append(f"| {row.network} | {row.optimizer} | {row.algorithm} | {gain} | {loss} |")
    return "\n".join(lines) + "\n"
