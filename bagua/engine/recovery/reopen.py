"""Opens the groups of a new membership epoch and puts a new engine in the place of the old one."""

from __future__ import annotations

import logging
import time
import weakref
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from bagua.algorithms.base import LostStep
from bagua.comm.abortable_nccl import warm_up_nccl
from bagua.engine.engine import Engine
from bagua.engine.hooks import Attachment, attach, attachments
from bagua.engine.recovery.backup import Backup
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.recovery.mean import average_replicas
from bagua.engine.recovery.old_keys import delete_old_groups
from bagua.engine.recovery.opened_groups import AtRest, OpenedGroups, agree_on_groups, install_engine
from bagua.engine.recovery.opening import Opening
from bagua.engine.recovery.together import work_together
from bagua.engine.recovery.transfer import Arrivals, fetch_weights
from bagua.errors import CommunicationError, RankMismatchError
from bagua.membership.seat import View

__all__ = ["follow_membership", "join_job"]

_POLL_S = 0.002
_AGAIN = 3  # times that a newcomer fetches what has changed during the last time
_SOON_S = 5.0  # a transfer during which little changes that one step does not change
_SHARE = 0.5  # of the weights that may have changed
_log = logging.getLogger("bagua")


def follow_membership(module: nn.Module, attachment: Attachment, manager: RecoveryManager) -> None:
    """From now on each step of `module` begins with the agreement of the host's agent, or with new groups."""
    arrivals = Arrivals(manager)
    attachment.before_step = partial(_before_step, manager, arrivals)
    await_groups = partial(_await_groups, manager, arrivals)
    attachment.average = partial(average_replicas, manager, await_groups)
    attachment.work_together = partial(work_together, manager, await_groups)
    manager.recover = partial(_recover_within_step, manager, weakref.ref(module))
    weakref.finalize(module, _module_is_gone, weakref.ref(manager)).atexit = False


def _module_is_gone(ref: weakref.ref[RecoveryManager]) -> None:
    manager = ref()
    if manager is not None:  # the thread that opens groups holds it
        manager.stop_soon()


def join_job(module: nn.Module, manager: RecoveryManager) -> None:
    """Take part in a running job: fetch the weights and open groups with those that train.

    Also if a rank was lost while the job began: then with those that are left.

    Raises:
        CommunicationError: it did not succeed within `max_blocked_s`.
        RankMismatchError: the others train another module or with other options.
    """
    device = attachments[module].engine.inventory.device
    if manager.newcomer and manager.options.backend == "nccl" and device.type == "cuda":
        try:
            warm_up_nccl(device)
        except RuntimeError as error:  # opening the groups says more
            _log.warning("recovery: NCCL does not start on %s: %s", device, error)
    _recover(manager, module)


def _before_step(manager: RecoveryManager, arrivals: Arrivals, module: nn.Module) -> None:
    """Before a forward pass in training mode: return when the step can begin.

    Raises:
        CommunicationError: training cannot go on.
    """
    while True:
        tracker = attachments[module].engine.tracker
        if tracker.nesting.inside:
            return
        if tracker.stepped:
            tracker.end_step()  # not all optimizers made a step
            continue
        if tracker.forward_seen or manager.progress.begun:
            return
        if manager.to_skip and not manager.out_of_use:
            return
        if attachments[module].engine.state.lost_step is LostStep.FREE and not manager.lost:
            _before_free_step(manager, arrivals, module)
            return
        if not (manager.lost or manager.severed) and manager.may_begin(manager.round):
            engine = attachments[module].engine
            arrivals.serve(engine)
            manager.meetings.begins(engine.team, manager.group, engine.step)
            return
        _recover(manager, module)


def _before_free_step(manager: RecoveryManager, arrivals: Arrivals, module: nn.Module) -> None:
    """As `_before_step`, of a step that waits for no other rank. Groups are opened beside the steps.

    Training waits while an epoch is being decided, so a minority does not train on, and to put the new engine in place.
    """
    began = time.monotonic()
    while True:
        attachment, opening = attachments[module], manager.opening
        if opening is None:
            if not manager.severed and manager.may_begin(manager.round):
                arrivals.serve(attachment.engine)
                return
            attachment.engine.failures.give_up()
            manager.leave_groups()
            work = partial(_open_groups, manager, attachment.engine, manager.view)
            manager.opening = Opening(work, manager.stop_soon)
            continue
        opening.rest()
        if not opening.done:
            if manager.may_go_on():
                manager.waited_s += time.monotonic() - began
                return
            time.sleep(_POLL_S)
            continue
        manager.opening, opened = None, opening.result()
        try:
            manager.check_group()
            engine = install_engine(manager, attachment, opened)
        except (RankMismatchError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            opened.drop()
            manager.reopening_failed(error)
        else:
            _put_in_place(manager, module, engine, opened.before)
            manager.recovered(opened.before, engine.step, manager.waited_s + time.monotonic() - began)


def _await_groups(manager: RecoveryManager, arrivals: Arrivals, module: nn.Module) -> None:
    """Between two steps: return when groups are in use whose members have not changed.

    Raises:
        CommunicationError: training cannot go on.
    """
    while True:
        if attachments[module].engine.state.lost_step is LostStep.FREE and not manager.lost:
            _before_free_step(manager, arrivals, module)
            if manager.opening is None:
                return
            time.sleep(_POLL_S)
        elif manager.severed or manager.out_of_use or (manager.lost and not manager.to_skip):
            _recover(manager, module)
        else:
            return


def _recover_within_step(manager: RecoveryManager, ref: weakref.ref[nn.Module]) -> None:
    module = ref()
    assert module is not None, "its optimizer is in a step"
    _recover(manager, module)


def _recover(manager: RecoveryManager, module: nn.Module) -> None:
    """Train in the groups of the next epoch. A step that was ending has ended then."""
    while True:
        _open_next(manager, module)
        tracker = attachments[module].engine.tracker
        if not tracker.ending or tracker.exchange_and_count():
            return


def _open_next(manager: RecoveryManager, module: nn.Module) -> None:
    """Open the groups of the next epoch; of those after it, where a member is lost meanwhile."""
    attachment = attachments[module]
    attachment.engine.failures.give_up_aside()
    manager.leave_groups()
    attachment.engine.pool.drain()  # weights are the training thread's from here on
    before = manager.view
    while True:
        opened = _open_groups(manager, attachment.engine, before)
        try:
            engine = install_engine(manager, attachment, opened)
            break
        except (RankMismatchError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            manager.reopening_failed(error)
    _put_in_place(manager, module, engine, before)
    manager.recovered(before, engine.step)


def _open_groups(
    manager: RecoveryManager, engine: Engine, before: View | None, opening: Opening[OpenedGroups] | None = None
) -> OpenedGroups:
    """Groups of the next epoch, in which no member is lost while they are opened.

    Args:
        before: the members so far.
        opening: in whose thread this runs; None: in the training thread.
    """
    at_rest = nullcontext if opening is None else opening.weights_at_rest
    while True:
        view = manager.await_view(partial(_learn, manager, engine, at_rest))
        try:
            return agree_on_groups(manager, engine, manager.open_team(view, engine.inventory.device), before, at_rest)
        except (RankMismatchError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            manager.reopening_failed(error)


def _put_in_place(manager: RecoveryManager, module: nn.Module, engine: Engine, before: View | None) -> None:
    """`engine` trains `module` from now on.

    Args:
        before: the members whose groups were in use.
    """
    attachment = attachments[module]
    attachment.engine.failures.give_up()
    attachments[module] = attach(module, engine, (), attachment.process_group, instead_of=attachment)
    attachments[module].before_step = attachment.before_step  # hosts that join are being served meanwhile
    attachments[module].average = attachment.average
    attachments[module].work_together = attachment.work_together
    attachment.engine.pool.forget_background()
    attachment.engine.close()
    manager.watch(engine.pool)
    # Threads of the last groups may be ending, and write; those before, and groups that came to nothing, are over.
    delete_old_groups(engine.team, manager.group, manager.group if before is None else before.group)


def _learn(manager: RecoveryManager, engine: Engine, at_rest: AtRest, view: View) -> None:
    """Fetch the weights beside training; if that fails it is tried again."""

    def check() -> None:
        now = manager.seat.view()
        if now is None or now.store != view.store or now.rank is not None:
            raise CommunicationError("the members have changed")

    name, timeout_s = manager.seat.name, manager.options.open_timeout_s
    manager.backup = None
    try:
        with at_rest():
            began = time.monotonic()
            fetched = fetch_weights(engine, name, view.store, timeout_s, check)
            assert fetched is not None
            engine.state.step, manager.round = fetched.step, fetched.round
            for _ in range(_AGAIN):  # what has changed meanwhile: the others need not wait for that then
                if time.monotonic() - began < _SOON_S:
                    break
                began = time.monotonic()
                if (again := fetch_weights(engine, name, view.store, timeout_s, check, most=_SHARE)) is None:
                    break
                fetched = again
                engine.state.step, manager.round = fetched.step, fetched.round
            if at_rest is nullcontext:  # else steps may be made before the groups open
                manager.backup = Backup.of(engine.inventory, engine.optimizers)
    except RuntimeError as error:
        _log.warning("recovery: %s could not fetch the weights: %s", name, error)
        return
    counts = manager.has_fetched(fetched.epoch, fetched.round)
    if counts:
        manager.progress.receive(fetched.progress)
    _log.info("recovery: %s has fetched the weights of step %d%s", name, fetched.step, "" if counts else ", too late")
