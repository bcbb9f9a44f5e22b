"""What cannot be combined with fault tolerance yet."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TypeGuard

import torch

from bagua.algorithms.auto import Auto
from bagua.algorithms.base import Algorithm
from bagua.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from bagua.algorithms.registry import registry
from bagua.algorithms.warmup import Warmup
from bagua.comm.abortable_nccl import why_no_nccl
from bagua.engine.startup.request import Request
from bagua.membership.seat import Seat

__all__ = ["check_tolerates", "take_seat", "without_mixed_halves"]

_taken: weakref.WeakSet[Seat] = weakref.WeakSet()


def check_tolerates(request: Request, module: object, has_group: bool, seat: Seat) -> ValueError | None:
    """What cannot go on after a lost rank yet; None if all can.

    Args:
        module: of the user.
        has_group: the user gave a process group.
        seat: of this process; its agent counts the steps of one module, from the first on.
    """
    algorithm, inventory = request.algorithm, request.inventory
    if request.tolerates_over == "nccl" and inventory is not None and (problem := why_no_nccl(inventory.device)):
        return ValueError(f'fault_tolerant: backend: "nccl" cannot be used: {problem}')
    if isinstance(algorithm, Warmup) and not algorithm.lost_step:
        return ValueError(
            "fault_tolerant: Warmup needs a first algorithm that skips a lost step, such as gradient_allreduce, "
            "bytegrad or power_sgd, and then one that has a rule for it, too"
        )
    if isinstance(algorithm, Auto):
        return ValueError(
            'fault_tolerant: not with algorithm "auto" yet: a newcomer would know neither what the others have measured'
            " nor whose turn it is, and a lost step would count as a slow one; name an algorithm"
        )
    if algorithm is not None and not algorithm.lost_step:
        known = ", ".join(sorted(name for name in registry.builtin() if registry[name].lost_step is not None))
        return ValueError(
            f"fault_tolerant: {algorithm.name!r} has no rule for a lost step yet; these have one: {known}"
        )
    mixed = [each for each in _parts(algorithm) if _sums_weights_in_place(each) and each.hierarchical]
    if mixed:
        return ValueError(
            f"hierarchical: {mixed[0].name!r} sums weights in place, so a lost rank would leave sums instead of "
            "weights; with fault_tolerant leave it out, or pass overlap=True"
        )
    if algorithm is not None and not request.optimizers:
        return ValueError(f"optimizers: {algorithm.name!r} needs them with fault_tolerant: a step ends with theirs")
    if seat in _taken:
        return ValueError("fault_tolerant: a module of this process was given it before, and only one can be")
    refused = {
        "process_group": has_group,
        "guard": request.guard is not None,
        "broadcast_buffers": request.broadcast_buffers,
        "autotune": request.tune is not None,
        "rank_order": request.rank_order is not None,
        "routes": request.routes == "measured",
    }
    for name, given in refused.items():
        if given:
            return ValueError(f"{name}: not with fault_tolerant yet")
    for name, each in module.named_modules() if isinstance(module, torch.nn.Module) else ():
        if isinstance(each, torch.nn.SyncBatchNorm):
            return ValueError(
                f"module: {name or 'it'} is a SyncBatchNorm, whose process group ends with the first lost rank; use "
                "BatchNorm, or GroupNorm for small batches, with fault_tolerant"
            )
    if any(isinstance(each, torch.optim.LBFGS) for each in request.optimizers):
        return ValueError("optimizers: LBFGS evaluates the model within its step; not with fault_tolerant")
    return None


def without_mixed_halves(algorithm: Algorithm | None) -> Algorithm | None:
    """`algorithm`, without a hierarchy by default if that would leave half a sum in place of weights after a loss."""
    if isinstance(algorithm, Warmup):
        first, then = (without_mixed_halves(part) for part in algorithm.parts)
        assert first is not None and then is not None
        return replace(algorithm, first=first, then=then)
    if _sums_weights_in_place(algorithm) and algorithm.hierarchical is None:
        return replace(algorithm, hierarchical=False)
    return algorithm


def _parts(algorithm: Algorithm | None) -> list[Algorithm]:
    """Those that a warm-up schedules, or the algorithm itself."""
    if isinstance(algorithm, Warmup):
        return [each for part in algorithm.parts for each in _parts(part)]
    return [] if algorithm is None else [algorithm]


def _sums_weights_in_place(algorithm: Algorithm | None) -> TypeGuard[LowPrecisionDecentralized]:
    """Whether the sum within a node works on the weights themselves, and not on a copy that is dropped."""
    return isinstance(algorithm, LowPrecisionDecentralized) and not algorithm.overlap


def take_seat(seat: Seat) -> None:
    """From now on its agent counts the steps of one module."""
    _taken.add(seat)
