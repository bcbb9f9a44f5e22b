"""Steps between two exchanges of an algorithm."""

from __future__ import annotations

from typing import Any

__all__ = ["interval_of"]


def interval_of(algorithm: Any) -> int:
    """Return the steps from one exchange of `algorithm` to the next."""
    return int(getattr(algorithm, "communication_interval", 1))
