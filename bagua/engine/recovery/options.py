"""The options of fault-tolerant training."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bagua.membership.remote_seat import RemoteSeat
from bagua.membership.seat import Seat
from bagua.membership.seat_service import SEAT

__all__ = ["FaultTolerance", "as_fault_tolerance", "is_fault_tolerant", "seat_of"]

_BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class FaultTolerance:
    """Options of `bagua.distribute(..., fault_tolerant=...)`.

    How soon a host counts as lost is an option of the launcher: `bagua run --fault-tolerant --detect-s`.

    Args:
        open_timeout_s: seconds to open the process groups of a new membership epoch, and for one transfer on them.
        max_blocked_s: seconds to wait for a membership epoch, for example while a minority is cut off. After it the
            rank raises `CommunicationError`.
        seat: internal: the connection to the agent of this host. Default: to the launcher's.
        backend: what carries the exchanges of CUDA tensors: "gloo", through host memory, or "nccl", which has run on
            one GPU that three ranks shared. Equal on all ranks. What newcomers fetch goes over gloo in any case.

    Raises:
        ValueError: names the option that is not a positive number of seconds, or no such backend.

    Examples:
        >>> bagua.FaultTolerance(max_blocked_s=600.0).open_timeout_s
        60.0
    """

    open_timeout_s: float = 60.0
    max_blocked_s: float = 1800.0
    seat: Seat | None = field(default=None, compare=False, repr=False)
    backend: str = "gloo"

    def __post_init__(self) -> None:
        for name in ("open_timeout_s", "max_blocked_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}: expected a positive number of seconds, got {value!r}")
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(map(repr, _BACKENDS))}, got {self.backend!r}")


def is_fault_tolerant() -> bool:
    """Whether `bagua run --fault-tolerant` started this process. `distribute` opens the process groups then.

    Examples:
        >>> fault_tolerant = bagua.elastic.is_fault_tolerant()
        >>> if not fault_tolerant:
        ...     bagua.init_process_group()
        >>> model = bagua.distribute(model, optimizer, "bytegrad", fault_tolerant=fault_tolerant)
    """
    return bool(os.environ.get(SEAT))


def as_fault_tolerance(value: Any) -> FaultTolerance | None:
    """The options in `fault_tolerant`, an argument of `distribute`; None if it is off.

    Raises:
        TypeError: it is neither a bool nor options.
        ValueError: there is no launcher that knows the members.
    """
    if value is None or value is False:
        return None
    if value is not True and not isinstance(value, FaultTolerance):
        raise TypeError(f"fault_tolerant: expected True, False or bagua.FaultTolerance, got {type(value).__name__}")
    options = FaultTolerance() if value is True else value
    if options.seat is None and not is_fault_tolerant():
        raise ValueError(
            "fault_tolerant: no launcher tells this rank who the members are; start with `bagua run --fault-tolerant`"
        )
    return options


def seat_of(options: FaultTolerance) -> Seat:
    """The connection to the agent of this host."""
    return options.seat if options.seat is not None else _seat_of_launcher(os.getpid())


@cache
def _seat_of_launcher(pid: int) -> Seat:
    """One connection for the whole process `pid`: a forked one needs its own."""
    return RemoteSeat()
