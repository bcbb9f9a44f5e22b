"""The ranks of a membership epoch as a team."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

from bagua.comm.node_keys import in_site
from bagua.comm.remote_store import connect_store
from bagua.comm.team import Team
from bagua.engine.recovery.old_keys import prefix_of_group
from bagua.engine.recovery.options import FaultTolerance
from bagua.membership.seat import View

__all__ = ["team_of_epoch"]


def team_of_epoch(
    view: View, host: str, options: FaultTolerance, device: torch.device, alert: Callable[[], object]
) -> Team:
    """The members of `view`, which meet in the store of the first one.

    Args:
        host: this one's name.
        device: of the parameters.
        alert: raises once the members have changed.

    Raises:
        CommunicationError: the store does not answer, or the members have changed meanwhile.
    """
    assert view.rank is not None
    store = connect_store(view.store, prefix_of_group(view.group), options.open_timeout_s, alert)
    return Team(
        view.rank,
        len(view.members),
        store,
        timedelta(seconds=options.open_timeout_s),
        options.backend,
        f"epoch {view.epoch}",
        node=in_site(f"host={host}"),
        staged=device.type == "cuda" and options.backend == "gloo",
        device=_indexed(device),
        alert=alert,
    )


def _indexed(device: torch.device) -> torch.device:
    """With a number, if it is one of several: other threads may have another current device."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
