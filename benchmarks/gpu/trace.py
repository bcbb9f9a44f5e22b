"""Reads a trace of torch.profiler: what ran on which stream of the GPU, and how much of it beside other streams."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Span", "overlap_us", "read", "spans_by_stream"]

Span = tuple[float, float]  # begin and end, us
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, compressed or not."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text)["traceEvents"]


def spans_by_stream(events: Sequence[dict[str, Any]]) -> dict[int, list[tuple[Span, str]]]:
    """What ran on each stream, with names."""
    found: dict[int, list[tuple[Span, str]]] = {}
    for event in events:
        if event.get("cat") in _ON_GPU and "dur" in event:
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            found.setdefault(int(event["args"]["stream"]), []).append((span, event["name"]))
    return found


def overlap_us(mine: Sequence[Span], others: Sequence[Span]) -> float:
    """Microseconds in which one of `mine` and one of `others` were both under way."""
    a, b = _merged(mine), _merged(others)
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
