"""Lines of other processes, which may not come."""

from __future__ import annotations

import threading
from typing import IO

__all__ = ["read_line"]


def read_line(stream: IO[str] | None, what: str, timeout_s: float = 100.0) -> str:
    """The next line of a pipe; empty at its end.

    Raises:
        AssertionError: none came in time; names `what`.
    """
    assert stream is not None
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(stream.readline()), daemon=True)
    reader.start()
    reader.join(timeout_s)
    assert found, f"no {what} within {timeout_s:g} s"
    return found[0]
