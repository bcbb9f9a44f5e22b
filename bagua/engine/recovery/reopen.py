"""Opens the groups of a new membership epoch and puts a new engine in the place of the old one."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bagua.algorithms.base import LostStep, Payload
from bagua.comm.team import Team, decode, encode
from bagua.engine.engine import Engine
from bagua.engine.hooks import Attachment, attach, attachments
from bagua.engine.lanes.lane import make_lane
from bagua.engine.recovery.catch_up import catch_up, go_on_without, kept_tensors, position_of
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.recovery.transfer import Arrivals, fetch_weights, fingerprint
from bagua.engine.startup.rollback import unless_it_fails
from bagua.errors import CommunicationError, RankMismatchError
from bagua.membership.seat import View

__all__ = ["follow_membership", "join_job"]

_log = logging.getLogger("bagua")


def follow_membership(module: nn.Module, attachment: Attachment, manager: RecoveryManager) -> None:
    """From now on each step of `module` begins with the agreement of the host's agent, or with new groups."""
    attachment.before_step = partial(_before_step, manager, Arrivals(manager))
    manager.recover = partial(_recover_within_step, manager, weakref.ref(module))


def join_job(module: nn.Module, manager: RecoveryManager) -> None:
    """Take part in a running job: fetch the weights and open groups with those that train.

    Raises:
        CommunicationError: it did not succeed within `max_blocked_s`.
        RankMismatchError: the others train another module or with other options.
    """
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
        if not (manager.lost or manager.severed) and manager.may_begin(manager.round):
            arrivals.serve(attachments[module].engine)
            return
        _recover(manager, module)


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
    attachment.engine.failures.give_up()
    manager.leave_groups()
    attachment.engine.pool.drain()  # weights are the training thread's from here on
    before = manager.view
    while True:
        view = manager.await_view(partial(_learn, manager, attachment.engine))
        try:
            team = manager.open_team(view, attachment.engine.inventory.device)
            engine = _reopen(manager, module, attachment, team)
            break
        except (RankMismatchError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            manager.reopening_failed(error)
    attachment.engine.failures.give_up()
    attachments[module] = attach(module, engine, (), attachment.process_group, instead_of=attachment)
    follow_membership(module, attachments[module], manager)
    attachment.engine.close()
    manager.watch(engine.pool)
    manager.recovered(before, engine.step)


def _learn(manager: RecoveryManager, engine: Engine, view: View) -> None:
    """Fetch the weights beside training; if that fails it is tried again."""

    def check() -> None:
        now = manager.seat.view()
        if now is None or now.store != view.store or now.rank is not None:
            raise CommunicationError("the members have changed")

    name = manager.seat.name
    try:
        epoch, count, step, progress = fetch_weights(engine, name, view.store, manager.options.open_timeout_s, check)
    except RuntimeError as error:
        _log.warning("recovery: %s could not fetch the weights: %s", name, error)
        return
    engine.state.step, manager.round = step, count
    counts = manager.has_fetched(epoch, count)
    if counts:
        manager.progress.receive(progress)
    _log.info("recovery: %s has fetched the weights of step %d%s", name, step, "" if counts else ", too late")


def _reopen(manager: RecoveryManager, module: nn.Module, attachment: Attachment, team: Team) -> Engine:
    """An engine on groups of `team`. Collective among its ranks; those that are behind catch up first.

    Raises:
        CommunicationError: a member is lost, or the members have changed.
        RankMismatchError: another rank trains another module or with other options.
    """
    old = attachment.engine
    inventory, config, root = old.inventory, old.config, old.state.root
    mine = {
        **position_of(manager, old),
        "lanes_of_sums": config.lanes_of_sums,
        "order": old.state.order,
        "node": team.node,
        "fingerprint": fingerprint(old),
    }
    messages = team.all_gather_bytes("opening the groups of a membership epoch", encode(mine))
    ranks: list[dict[str, Any]] = [decode(each) for each in messages]
    source, behind, without = _who_leads(ranks)
    if mine["fingerprint"] != ranks[source]["fingerprint"]:
        raise RankMismatchError(f"this rank trains another module than rank {source}, or with other options")
    for rank, each in enumerate(ranks):
        if each["fingerprint"] != mine["fingerprint"]:
            raise CommunicationError(f"rank {rank} trains another module, or with other options: it has to leave")
    progress = _progress_of(manager, team, ranks, source, bool(behind or without))
    catch_up(manager, old, team, ranks, source, behind, progress)
    if team.rank in without:
        go_on_without(manager, old, ranks[source], progress)
    key = team.next_lane()
    nodes = team.discover_nodes([each["node"] for each in ranks])
    groups = team.open(f"lane/{key}", root.hierarchical_groups, nodes)
    try:
        lane = make_lane(groups, inventory.device)
    except BaseException:
        groups.leave(abort=True)
        raise
    old.binding.release_buckets()
    config = replace(config, lanes_of_sums=ranks[source]["lanes_of_sums"])
    with unless_it_fails(inventory.trainable.values(), lane, remember=False):
        order, notices = ranks[source]["order"], old.state.notices
        engine = Engine(
            config,
            root,
            inventory,
            old.optimizers,
            team,
            lane,
            key,
            order,
            notices,
            recovery=manager,
            step=old.step,
        )
    try:
        if engine.algorithm.payload is Payload.PARAM:
            engine.dispatcher.rebuild()
        if manager.out_of_use:
            raise CommunicationError("the members have changed while the groups were opened")
    except BaseException:
        engine.failures.give_up()
        engine.close()
        raise
    engine.reducer.sync = old.reducer.sync
    _take_over(engine, old)
    _align(manager, ranks, source, {*behind, *without}, team.rank)
    if manager.newcomer:
        manager.progress.receive(progress)
    manager.progress.divide(ranks[source]["step"] + ranks[source]["ending"], team.rank, team.size)
    return engine


def _progress_of(
    manager: RecoveryManager, team: Team, ranks: Sequence[dict[str, Any]], source: int, wanted: bool
) -> bytes:
    """How far the user's loop is on rank `source`; empty if no rank has to know. Collective."""
    if not wanted and not any(each["newcomer"] for each in ranks):
        return b""
    mine = manager.progress.report() if team.rank == source else b""
    return team.all_gather_bytes("progress of the training loop", mine)[source]


def _who_leads(ranks: list[dict[str, Any]]) -> tuple[int, list[int], list[int]]:
    """The rank whose state others take over; those that do: they lack an exchange that counts, or are new; and those
    that lack one, but keep their state.

    Where replicas differ, a newcomer never leads: it has fetched no state that it could train on with. If it has the
    newest round all the same, from a rank that has been lost, all others go on without it.
    """
    newest = max(each["round"] for each in ranks)
    candidates = [rank for rank, each in enumerate(ranks) if not each["newcomer"]] or list(range(len(ranks)))
    source = max(candidates, key=lambda rank: (ranks[rank]["round"], ranks[rank]["step"], -rank))
    alike = ranks[source]["lost_step"] == LostStep.SKIP.value
    if alike:  # then a newcomer leads that alone holds a step of a rank that has been lost
        source = max(range(len(ranks)), key=lambda rank: (ranks[rank]["round"], not ranks[rank]["newcomer"], -rank))
    behind: list[int] = []
    without: list[int] = []
    for rank, each in enumerate(ranks):
        lacks = each["round"] < newest
        if each["newcomer"]:
            if rank != source and (not alike or lacks):
                behind.append(rank)
        elif lacks:
            keeps = each["lost_step"] == LostStep.KEEP.value or each["round"] == ranks[source]["round"]
            (without if keeps else behind).append(rank)
    ranks[source]["round"] = newest
    return source, behind, without


@torch.no_grad()
def _take_over(engine: Engine, old: Engine) -> None:
    """What `old` keeps goes on in `engine`."""
    engine.followed.take_over(old.followed)
    tensors = engine.memory.tensors
    for (name, index), tensor in kept_tensors(old).items():
        engine.memory.tensor(name, engine.buckets[index], tensor)
        tensors[name, index].copy_(tensor)
    if engine.buckets:
        engine.algorithm.on_members_changed(engine.context)
    if old.tracker.ending:
        engine.tracker.go_on_ending()


def _align(
    manager: RecoveryManager, ranks: Sequence[dict[str, Any]], source: int, moved: Collection[int], me: int
) -> None:
    """Skip as many steps as the rank that has lost most has lost more: batch numbers are equal then.

    Args:
        moved: ranks that are now where `source` is.
    """

    def missed(rank: int) -> int:
        at = ranks[source if rank in moved else rank]
        return ranks[rank]["attempts"] - at["step"] - at["ending"]

    most = max((missed(rank) for rank, each in enumerate(ranks) if not each["newcomer"]), default=0)
    if manager.newcomer:
        manager.attempts = most + ranks[source]["step"] + ranks[source]["ending"]
    skips = not (manager.newcomer or manager.progress.repeats)
    manager.to_skip = most - missed(me) if skips else 0
