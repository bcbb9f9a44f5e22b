"""JSON files: results of a benchmark, and what the ranks of one leave for each other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["write", "write_text"]


def write(path: Path, content: Any, indent: int | None = 1) -> None:
    """Write a JSON file that is there as a whole or not at all; makes its folder.

    Args:
        path: the file; what it holds is replaced.
        content: what `json.dumps` takes.
        indent: as in `json.dumps`; None for a single line.
    """
    write_text(path, json.dumps(content, indent=indent) + "\n")


def write_text(path: Path, text: str) -> None:
    """Like `write`, with what the file is to hold."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)
