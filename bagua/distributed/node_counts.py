"""How many nodes a job has: `--nnodes`."""

from __future__ import annotations

from torch.distributed.run import parse_min_max_nnodes

__all__ = ["parse_nnodes"]


def parse_nnodes(text: str) -> tuple[int, int]:
    """Fewest and most nodes.

    Raises:
        ValueError: neither N nor MIN:MAX.

    Examples:
        >>> parse_nnodes("2"), parse_nnodes("1:4")
        ((2, 2), (1, 4))
    """
    try:
        fewest, most = parse_min_max_nnodes(text)
    except (RuntimeError, ValueError):
        fewest = most = 0
    if not 0 < fewest <= most:
        raise ValueError(f"--nnodes {text}: expected N, or MIN:MAX with 0 < MIN <= MAX")
    return fewest, most
