"""Transfers that end when a member is lost, also in the middle of a message."""

from __future__ import annotations

from collections.abc import Callable

from bagua.comm.groups import Groups
from bagua.engine.lanes.lane import ThreadLane

__all__ = ["run_interruptibly"]

_LOOK_S = 0.05  # between two looks at the members


def run_interruptibly(groups: Groups, work: Callable[[], None], alert: Callable[[], object]) -> None:
    """Run `work`, which uses `groups`, in a thread, and return when it ends. The caller leaves the groups then.

    gloo does not wake who waits for a message of which a part has come or gone when its connection closes. So this
    thread looks out for a reason to end: it cuts the connections and leaves a transfer behind that they do not end.
    `work` touches no tensor any more by then.

    Args:
        alert: called again and again; raises if a member is lost.
    """
    lane = ThreadLane(groups)  # its thread ends when nobody holds it
    ticket = lane.submit(work, "weights")
    try:
        while not ticket.ends_within(_LOOK_S):
            alert()
    except BaseException:
        lane.sever()
        while not ticket.ends_within(_LOOK_S):
            lane.leave_stuck()
        raise
    error, ticket.error = ticket.error, None
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback holds this frame
