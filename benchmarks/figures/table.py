"""Tables of step times, for README and for the page on performance."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures.results import Tradeoff
from benchmarks.figures.tradeoff import STEPS

__all__ = ["NAME", "in_full", "in_short"]

NAME = "step times"
_SHORT = (
    "ddp",
    "ddp_fp16",
    "ddp_powersgd",
    "gradient_allreduce",
    "bytegrad",
    "int4",
    "qadam_1bit",
    "power_sgd",
    "low_precision_decentralized",
    "low_precision_decentralized_overlap",
    "local_sgd",
    "async",
    "diloco",
)


def in_short(results: Tradeoff) -> str:
    """Some entrants under all conditions."""
    return _table(results, _SHORT)


def in_full(results: Tradeoff) -> str:
    """All entrants under all conditions, and where they come from."""
    origin = (
        f"{results.date}, {results.hosts} emulated hosts with one rank each, {results.num_elements / 1e6:.0f} M fp32 "
        f"parameters, 300 ms of emulated compute: `benchmarks/results/{results.name}/tradeoff.json`.\n\n"
    )
    return origin + _table(results, STEPS)


def _table(results: Tradeoff, names: Sequence[str]) -> str:
    lines = [f"| | {' | '.join(results.all_conditions)} |", "|---" * (1 + len(results.all_conditions)) + "|"]
    for name in names:
        cells = [_cell(results, condition, name) for condition in results.all_conditions]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(results: Tradeoff, condition: str, name: str) -> str:
    row = results.row(condition, name)
    if row is None or not row["step_ms"]:
        return "-"
    return f"{row['step_ms']:.0f} ms, {row['ratio_to_ddp']:.2f}x, {row['efficiency']:.2f}"
