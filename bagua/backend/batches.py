"""Batches of sends and receives on groups of the backend "bagua".

`torch.distributed.batch_isend_irecv` gives NCCL a batch as one only if the group is of torch's own class. Of a group of
a subclass it starts each transfer by itself, which NCCL refuses, or which waits for ever where both ranks send first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["in_one_batch", "install"]

_MARK = "_of_bagua"


def in_one_batch(plain: Any, ops: Sequence[dist.P2POp]) -> list[Any]:
    """Start the transfers in one batch of NCCL; returns the works to wait for.

    Args:
        plain: group of torch's own class, whose backend can take a batch.
        ops: of the same members.
    """
    device = ops[0].tensor.device
    plain._start_coalescing(device)
    try:
        for op in ops:
            tensor = torch.view_as_real(op.tensor) if op.tensor.is_complex() else op.tensor
            start = plain.send if op.op is dist.isend else plain.recv
            start([tensor], op.group_peer, op.tag)
    finally:
        work = plain._end_coalescing(device)
    return [] if work is None else [work]


def install(plain_of: Callable[[Any], Any]) -> None:
    """Let `torch.distributed.batch_isend_irecv` give batches of groups of ours to NCCL. All other calls are torch's.

    Args:
        plain_of: the group that carries what is not compressed, or None of a group that is not ours.
    """
    original = distributed_c10d.batch_isend_irecv
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
        if p2p_op_list and isinstance(p2p_op_list[0], dist.P2POp):
            group, device = p2p_op_list[0].group or dist.group.WORLD, p2p_op_list[0].tensor.device
            plain = plain_of(group)
            if plain is not None and plain._get_backend(device).supports_coalescing:
                distributed_c10d._check_p2p_op_list(p2p_op_list)
                return in_one_batch(plain, p2p_op_list)
        return original(p2p_op_list)

    setattr(batch_isend_irecv, _MARK, True)
    for module in (dist, distributed_c10d):
        module.batch_isend_irecv = batch_isend_irecv  # pyright: ignore[reportAttributeAccessIssue]
