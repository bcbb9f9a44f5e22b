"""Channel counts of scaled models."""

from __future__ import annotations

__all__ = ["scaled"]


def scaled(channels: int, scale: float) -> int:
    """Return `scale` times `channels`, rounded, at least 1.

    Raises:
        ValueError: `scale` is not in (0, 4].
    """
    if not 0 < scale <= 4:
        raise ValueError(f"scale: expected a number > 0 and <= 4, got {scale!r}")
    return max(1, round(channels * scale))
