"""Which kind of lane the groups of an exchange need."""

from __future__ import annotations

import torch

from bagua.comm.groups import Groups
from bagua.engine.lanes.lane import InlineLane, Lane, ThreadLane
from bagua.engine.lanes.stream_lane import StreamLane

__all__ = ["make_lane"]


def make_lane(groups: Groups, device: torch.device) -> Lane:
    """Return the kind of lane that fits the groups' backend."""
    if groups.world.backend == "nccl" and not groups.world.abortable:
        return StreamLane(groups, device)
    return InlineLane(groups) if groups.world.backend == "local" else ThreadLane(groups, device=device)
