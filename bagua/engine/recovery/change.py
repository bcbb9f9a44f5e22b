"""A change of the members, for statistics."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MembershipChange"]


@dataclass(frozen=True)
class MembershipChange:
    """One change of the members, as a rank saw it.

    Attributes:
        epoch: number of the membership epoch.
        step: training steps completed when the new groups were in use.
        lost, joined: names of hosts.
        reason: why the epoch was decided.
        skipped: a step of this rank was dropped.
        stalled_s: seconds from when this rank noticed until it could begin the next step.
        time: when it could, in seconds since 1970.
    """

    epoch: int
    step: int
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    reason: str
    skipped: bool
    stalled_s: float
    time: float = 0.0
