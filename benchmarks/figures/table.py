"""The table of step times in README, between its two marks."""

from __future__ import annotations

from benchmarks.figures.results import Tradeoff

__all__ = ["with_table"]

_BEGIN, _END = "<!-- step times: python -m benchmarks.figures -->", "<!-- end of step times -->"
_ROWS = (
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


def with_table(text: str, results: Tradeoff) -> str:
    """Return `text` with the table between the marks renewed.

    Raises:
        ValueError: a mark is missing.
    """
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise ValueError(f"README: expected one {_BEGIN} and one {_END}")
    before, rest = text.split(_BEGIN)
    return f"{before}{_BEGIN}\n\n{_table(results)}\n{_END}{rest.split(_END)[1]}"


def _table(results: Tradeoff) -> str:
    lines = [f"| | {' | '.join(results.all_conditions)} |", "|---" * (1 + len(results.all_conditions)) + "|"]
    for name in _ROWS:
        cells = [_cell(results, condition, name) for condition in results.all_conditions]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(results: Tradeoff, condition: str, name: str) -> str:
    row = results.row(condition, name)
    if row is None or not row["step_ms"]:
        return "-"
    return f"{row['step_ms']:.0f} ms, {row['ratio_to_ddp']:.2f}x, {row['efficiency']:.2f}"
