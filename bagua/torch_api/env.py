"""Who am I? By the launcher's environment, else by `torch.distributed`, else the only process there is."""

from __future__ import annotations

import os

import torch.distributed as dist

from bagua.engine.plan import default_bucket_bytes as get_default_bucket_size

__all__ = [
    "get_default_bucket_size",
    "get_local_rank",
    "get_local_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
]


def get_rank() -> int:
    """RANK: my rank among all processes, 0 if alone.

    Raises:
        ValueError: the variable is no integer.
    """
    return _number("RANK", dist.get_rank() if dist.is_initialized() else 0)


def get_world_size() -> int:
    """WORLD_SIZE: the number of processes, 1 if alone.

    Raises:
        ValueError: the variable is no integer.
    """
    return _number("WORLD_SIZE", dist.get_world_size() if dist.is_initialized() else 1)


def get_local_rank() -> int:
    """LOCAL_RANK: my rank among the processes of this node, 0 by default.

    Raises:
        ValueError: the variable is no integer.
    """
    return _number("LOCAL_RANK", 0)


def get_local_size() -> int:
    """LOCAL_WORLD_SIZE: the number of processes on this node, 1 by default.

    Raises:
        ValueError: the variable is no integer.
    """
    return _number("LOCAL_WORLD_SIZE", 1)


def get_node_rank() -> int:
    """Number of this node: GROUP_RANK under torchrun, else NODE_RANK, else 0.

    Raises:
        ValueError: the variable is no integer.
    """
    if all(name in os.environ for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        return _number("GROUP_RANK", 0)
    return _number("NODE_RANK", 0)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}: expected an integer in the environment, got {text!r}") from None
