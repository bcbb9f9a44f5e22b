"""Progress display of long measurements."""

from __future__ import annotations

import sys

__all__ = ["clear", "show"]


def show(text: str) -> None:
    """Replace the last line of the terminal by `text`; nothing where stderr is a file or a pipe."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def clear() -> None:
    """Remove what `show` wrote, before a line that stays."""
    show("")
