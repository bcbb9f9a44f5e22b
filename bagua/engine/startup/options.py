"""Keyword arguments that neither `distribute` nor the algorithm takes: what was meant, as far as that can be told."""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass
from typing import Any

from bagua.algorithms.auto import Auto
from bagua.algorithms.base import Algorithm
from bagua.algorithms.registry import registry

__all__ = ["OF_DDP", "OWN", "check_options"]

#: Keyword arguments of `distribute`.
OWN = (
    "process_group",
    "bucket_bytes",
    "num_lanes",
    "hierarchical",
    "guard",
    "broadcast_buffers",
    "static_graph",
    "gradient_as_bucket_view",
    "rank_order",
    "routes",
    "transport",
    "autotune",
    "fault_tolerant",
)
# What papers and other libraries call options of algorithms.
_CALLED = {
    **dict.fromkeys(("H", "interval", "local_steps", "period", "sync_every"), "communication_interval"),
    **dict.fromkeys(("compression", "compressor"), "codec"),
    "matrix_approximation_rank": "rank",
    "use_error_feedback": "error_feedback",
}
_ALREADY_THERE = "leave it out and move the module and its inputs to the device yourself"
#: Arguments of `DistributedDataParallel`, and what to do instead.
OF_DDP = {
    "device_ids": _ALREADY_THERE,
    "output_device": _ALREADY_THERE,
    "dim": "leave it out: inputs are never split over devices",
    "bucket_cap_mb": "pass bucket_bytes, in bytes, or leave it to its default",
    "bucket_cap_mb_list": "pass bucket_bytes, in bytes, for all buckets, or leave it to its default",
    "find_unused_parameters": "leave it out: unused parameters are found in every step",
    "check_reduction": "leave it out: a reduction that fails always raises",
    "forward_sync_buffers": "pass broadcast_buffers, which does the same",
    "init_sync": "leave it out: parameters and buffers are always compared and broadcast at the start",
    "init_sync_buffers": "leave it out: buffers are always broadcast at the start",
    "device_mesh": "pass a one-dimensional DeviceMesh as process_group",
    "mixed_precision": 'leave it out and use torch.autocast; for gradients sent in 16 bits pass codec="bf16" to '
    '"gradient_allreduce"',
    "delay_all_reduce_named_params": "leave it out: it has no counterpart",
    "param_to_hook_all_reduce": "leave it out: it has no counterpart",
    "skip_all_reduce_unused_params": "leave it out: unused parameters are found in every step",
    "batched_grad_copy": "leave it out: gradients are views of buckets by default",
    "lazy_bucket_allocation": "leave it out: gradients are views of buckets by default, so they take no memory twice",
}


def check_options(algorithm: str | Algorithm, options: dict[str, Any]) -> None:
    """Refuse arguments that are DDP's, misspelt or unknown; values are checked by the algorithm itself.

    Raises:
        ValueError: names the argument and what to do instead.
    """
    cls = Auto if algorithm == Auto.name else type(algorithm)
    if isinstance(algorithm, str) and cls is not Auto:
        if algorithm not in registry:
            return
        cls = registry[algorithm]
    if not (options and issubclass(cls, Algorithm)):
        return
    known = [field.name for field in fields(cls) if field.init] if is_dataclass(cls) else []
    for option in options:
        if option in known or option in OWN:
            continue
        if option in OF_DDP:
            raise ValueError(
                f"{option}: an argument of DistributedDataParallel, not of bagua.distribute(); {OF_DDP[option]} "
                "(docs/from-ddp.md)"
            )
        called = _CALLED.get(option)
        close = [called] if called in known else difflib.get_close_matches(option, [*OWN, *known], 1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"algorithm {cls.name!r} has no option {option!r}; it has: {', '.join(known) or 'none'}; "
            f"bagua.distribute() itself takes: {', '.join(OWN)}{meant}"
        )
