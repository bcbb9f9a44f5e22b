"""Opens the groups of a new membership epoch and puts a new engine in the place of the old one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bagua.comm.team import Team, decode, encode
from bagua.engine.engine import Engine
from bagua.engine.hooks import Attachment, attach, attachments
from bagua.engine.lanes.lane import make_lane
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.recovery.transfer import Arrivals, fetch_weights, fingerprint
from bagua.engine.startup.broadcast import replicate_optimizers, replicate_tensors
from bagua.engine.startup.rollback import unless_it_fails
from bagua.errors import CommunicationError, RankMismatchError
from bagua.membership.seat import View

__all__ = ["follow_membership", "join_job"]

_log = logging.getLogger("bagua")


def follow_membership(module: nn.Module, attachment: Attachment, manager: RecoveryManager) -> None:
    """From now on each step of `module` begins with the agreement of the host's agent, or with new groups."""
    attachment.before_step = partial(_before_step, manager, Arrivals(manager))


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
        if tracker.forward_seen:
            return
        if manager.to_skip and not manager.out_of_use:
            return
        if not manager.lost and manager.may_begin(attachments[module].engine.step):
            arrivals.serve(attachments[module].engine)
            return
        _recover(manager, module)


def _recover(manager: RecoveryManager, module: nn.Module) -> None:
    """Open the groups of the next epoch; of those after it, where a member is lost meanwhile."""
    attachment = attachments[module]
    attachment.engine.failures.give_up()
    manager.leave_groups()
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
    attachment.remove_hooks()
    attachment.engine.failures.give_up()
    attachments[module] = attach(module, engine, list(attachment.engine.optimizers), attachment.process_group)
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
        epoch, step = fetch_weights(engine, name, view.store, manager.options.open_timeout_s, check)
    except RuntimeError as error:
        _log.warning("recovery: %s could not fetch the weights: %s", name, error)
        return
    engine.state.step = step
    counts = manager.has_fetched(epoch, step)
    _log.info("recovery: %s has fetched the weights of step %d%s", name, step, "" if counts else ", too late")


@contextmanager
def _unless_interrupted(engine: Engine) -> Iterator[None]:
    """Within it a rank takes over weights; if that fails it has its own again, which may be needed."""
    inventory = engine.inventory
    tensors = [*inventory.parameters.values(), *inventory.frozen.values(), *inventory.buffers.values()]
    weights = [tensor.detach().clone() for tensor in tensors]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in engine.optimizers]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, old in zip(tensors, weights, strict=True):
                tensor.copy_(old)
        for optimizer, state in zip(engine.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        raise


def _reopen(manager: RecoveryManager, module: nn.Module, attachment: Attachment, team: Team) -> Engine:
    """An engine on groups of `team`. Collective among its ranks; the weights are those of the most advanced one.

    Raises:
        CommunicationError: a member is lost, or the members have changed.
        RankMismatchError: another rank trains another module or with other options.
    """
    old = attachment.engine
    inventory, config, root = old.inventory, old.config, old.state.root
    mine = {
        "step": old.step,
        "attempts": None if manager.newcomer else manager.attempts,
        "lanes_of_sums": config.lanes_of_sums,
        "order": old.state.order,
        "node": team.node,
        "fingerprint": fingerprint(old),
    }
    messages = team.all_gather_bytes("opening the groups of a membership epoch", encode(mine))
    ranks: list[dict[str, Any]] = [decode(each) for each in messages]
    step = max(each["step"] for each in ranks)
    source = next(rank for rank, each in enumerate(ranks) if each["step"] == step)
    if mine["fingerprint"] != ranks[source]["fingerprint"]:
        raise RankMismatchError(f"this rank trains another module than rank {source}, or with other options")
    for rank, each in enumerate(ranks):
        if each["fingerprint"] != mine["fingerprint"]:
            raise CommunicationError(f"rank {rank} trains another module, or with other options: it has to leave")
    key = team.next_lane()
    nodes = team.discover_nodes([each["node"] for each in ranks])
    groups = team.open(f"lane/{key}", root.hierarchical_groups, nodes)
    try:
        # A lost step changes no weights. So only a rank that lacks a step that counts needs the others'.
        if any(each["step"] != step for each in ranks):
            with _unless_interrupted(old) if old.step != step else nullcontext():
                everything = {**inventory.parameters, **inventory.frozen}
                tensors = [*everything.values(), *inventory.buffers.values()]
                replicate_tensors(tensors, groups.world, inventory.device, source)
                replicate_optimizers(old.optimizers, everything, team, groups.world, inventory.device, source)
                if old.step != step:
                    manager.weights_fetched(step)
                    old.state.step = step  # also if these groups are never used
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
            step=step,
        )
    if manager.out_of_use:
        engine.failures.give_up()
        engine.close()
        raise CommunicationError("the members have changed while the groups were opened")
    engine.reducer.sync = old.reducer.sync
    most = max((each["attempts"] for each in ranks if each["attempts"] is not None), default=manager.attempts)
    if manager.newcomer:
        manager.attempts = most
    manager.to_skip = most - manager.attempts
    return engine
