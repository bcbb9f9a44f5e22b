"""What the tables of held-out conditions say beside the step times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagua.bench.layout import markdown_table

__all__ = ["KIND", "check_bytes", "facts"]

KIND = "held-out"


def facts(report: dict[str, Any]) -> list[str]:
    """What the table says of its conditions."""
    settings = report["settings"]
    form = ", quick form" if settings["quick"] else ""
    return [
        f"held out: {len(settings['drawn'])} conditions drawn with seed {settings['seed']}{form}",
        "one rank on each host",
        "a model is KIND@SEED/ELEMENTS",
    ]


def check_bytes(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the bytes that hosts sent, as their devices count, beside the formulas.

    Devices count headers, acknowledgements and what is sent again after a loss. Formulas leave out the scales of
    codecs.
    """
    measured = [row for row in rows if not row["error"] and row["bytes_from"] == "device" and row["formula_bytes"]]
    cells = [
        [
            f"{row['condition']}, {row['hosts']} hosts",
            row["entrant"],
            f"{row['bytes_per_host'] / 1e6:.3f}",
            f"{row['formula_bytes'] / 1e6:.3f}",
            f"{row['bytes_per_host'] / row['formula_bytes']:.3f}",
        ]
        for row in measured
    ]
    head = ("condition", "contender", "MB/host on the wire", "MB/host by formula", "ratio")
    return markdown_table(head, cells, range(2, 5))
