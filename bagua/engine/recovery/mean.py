"""The mean of replicas that differ, with ranks that may be lost while it is taken."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor, nn

from bagua.comm.team import Team
from bagua.engine.hooks import attachments
from bagua.engine.recovery.manager import RecoveryManager
from bagua.errors import CommunicationError

__all__ = ["average_replicas", "await_all"]

_WHAT = "bagua.average_parameters()"
_PATIENCE_S = 10.0  # after so long without a rank the log names it
_log = logging.getLogger("bagua")


def average_replicas(manager: RecoveryManager, await_groups: Callable[[nn.Module], None], module: nn.Module) -> None:
    """As `Replicas.average`; if a rank is lost meanwhile, those that are left average among themselves.

    All ranks that are left take the same mean. Each says that it holds it, and is done when all have said so. One that
    does not learn this any more holds it aside, and asks the others when the next groups are opened: the mean counts if
    one of them is done, and is taken anew with those that are left if none is.

    Args:
        await_groups: returns when groups are in use whose members have not changed.

    Raises:
        CommunicationError: no groups could be opened, or a rank that trains did not call it, within `max_blocked_s`.
    """
    number = manager.means + 1
    while _differ(module):
        await_groups(module)
        engine = attachments[module].engine
        params = list(engine.inventory.parameters.values())
        own = mean = None
        try:
            if engine.replicas.settle():
                own = _copies(params)
                await_all(manager, engine.team, f"mean/{number}/begin")
                engine.replicas.exchange()
                mean = _copies(params)
                await_all(manager, engine.team, f"mean/{number}/end")
            manager.means = number
            return
        except _Late:
            raise
        except CommunicationError as error:
            engine.failures.outlives_exchange(error)
            if own is not None:
                _put(params, own)
        await_groups(module)  # the ranks tell each other then
        if mean is not None and manager.means_of_others >= number:
            _put(params, mean)
            manager.means = number
            return


def await_all(manager: RecoveryManager, team: Team, name: str) -> None:
    """Return when all ranks have come to this point, however late, unless the members change.

    Args:
        name: of the point, used once in these groups.

    Raises:
        CommunicationError: the members have changed, or the store in which they meet is lost.
    """
    deadline, told = time.monotonic() + manager.options.max_blocked_s, False
    while True:
        began = time.monotonic()
        patience_s = max(min(_PATIENCE_S, deadline - began), 0.1)
        try:
            replace(team, timeout=timedelta(seconds=patience_s)).all_gather_bytes_once(_WHAT, name, b"")
            return
        except CommunicationError as error:
            manager.check_group()
            now = time.monotonic()
            if now - began < patience_s:
                raise
            if now > deadline:
                raise _Late(str(error)) from error
            if not told:
                _log.warning("%s; still waiting for it", error)
            told = True


class _Late(CommunicationError):
    """A rank that trains has not come."""


def _differ(module: nn.Module) -> bool:
    engine = attachments[module].engine
    return engine.state.algorithm.replicas_differ(engine.followed.alive)


def _copies(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


@torch.no_grad()
def _put(params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)
