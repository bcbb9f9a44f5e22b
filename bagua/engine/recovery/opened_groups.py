"""The groups of a new membership epoch: what their ranks agree on, and the engine that is made on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from bagua.algorithms.base import Algorithm, LostStep, Payload
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.comm.transport import goes_native, may_fall_back, why_gloo
from bagua.engine.engine import Engine
from bagua.engine.hooks import Attachment
from bagua.engine.lanes.lane import Lane
from bagua.engine.lanes.selection import make_lane
from bagua.engine.recovery.carry_errors import carry_errors
from bagua.engine.recovery.catch_up import catch_up, go_on_without, kept_tensors, position_of
from bagua.engine.recovery.leading import align, begun, who_leads
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.recovery.next_lanes import NextLanes
from bagua.engine.recovery.transfer import fingerprint
from bagua.engine.startup.rollback import unless_it_fails
from bagua.errors import CommunicationError, RankMismatchError
from bagua.membership.seat import View

__all__ = ["AtRest", "OpenedGroups", "agree_on_groups", "install_engine"]

_MEASURED = ("lanes_of_sums", "straight_chunk_bytes", "bdp_bytes")  # at the start, by those who were there
AtRest = Callable[[], AbstractContextManager[None]]  # within it the training thread leaves the weights alone


@dataclass
class OpenedGroups:
    """Groups that no engine uses yet.

    Attributes:
        before: the members before.
        algorithm: fitted to their nodes.
        ranks: what the ranks have told each other.
        source, behind, without: see `who_leads`.
        progress: see `_progress_of`.
    """

    before: View | None
    algorithm: Algorithm
    team: Team
    key: str
    lane: Lane
    ranks: list[dict[str, Any]]
    source: int
    behind: list[int]
    without: list[int]
    progress: bytes

    def drop(self) -> None:
        """Give them up."""
        self.lane.abandon()
        for groups in self.team.prepared.values():
            groups.leave(abort=True)
        self.team.prepared.clear()


def agree_on_groups(
    manager: RecoveryManager, old: Engine, team: Team, before: View | None, at_rest: AtRest
) -> OpenedGroups:
    """Groups of `team`. Collective among its ranks; those that are behind catch up first.

    Raises:
        CommunicationError: a member is lost, or the members have changed.
        RankMismatchError: another rank trains another module or with other options.
    """
    inventory, config = old.inventory, old.config
    mine = {
        **position_of(manager, old),
        "lanes": old.pool.num_opened,
        "shared": len(old.pool.shared) - 1,
        **{name: getattr(config, name) for name in _MEASURED},
        "order": old.state.order,
        "node": team.node,
        "fingerprint": fingerprint(old),
        "over gloo": why_gloo(manager.transport, team, inventory.device, over_gloo=False),
    }
    messages = team.all_gather_bytes("opening the groups of a membership epoch", encode(mine))
    ranks: list[dict[str, Any]] = [decode(each) for each in messages]
    source, behind, without = who_leads(ranks)
    manager.hear_of_means([each["means"] for each in ranks])
    manager.meetings.hear([each["met"] for each in ranks])
    if mine["fingerprint"] != ranks[source]["fingerprint"]:
        raise RankMismatchError(f"this rank trains another module than rank {source}, or with other options")
    for rank, each in enumerate(ranks):
        if each["fingerprint"] != mine["fingerprint"]:
            raise CommunicationError(f"rank {rank} trains another module, or with other options: it has to leave")
    lead = team.rank == source and bool(behind or without or any(each["newcomer"] for each in ranks))
    key, nodes = team.next_lane(), team.discover_sites([each["node"] for each in ranks])
    algorithm, _ = (manager.algorithm or old.state.root).for_nodes(nodes)
    free = ranks[source]["lost_step"] == LostStep.FREE.value  # an engine is then made without waiting for the others
    beside = bool(behind)  # ranks wait for a transfer, during which the lanes can be opened
    more = ranks[source]["lanes"] if free else ranks[source]["shared"] if beside else 0
    names = [f"lane/{key}", *(f"lane/{key}/{number + 1}" for number in range(more))]
    native, or_gloo = goes_native(team, [each["over gloo"] for each in ranks]), may_fall_back(manager.transport)
    lanes = NextLanes(team, names, algorithm.hierarchical_groups, nodes, beside, native, or_gloo)
    try:
        with at_rest() if lead or team.rank in behind else nullcontext():
            progress = _progress_of(manager, team, ranks, source, bool(behind or without))
            catch_up(manager, old, team, ranks, source, behind, progress)
        manager.replicated = True
        if team.rank in without:
            go_on_without(manager, old, ranks[source], progress)
        lane = make_lane(lanes.take(), inventory.device)
    except BaseException:
        lanes.drop()
        raise
    return OpenedGroups(before, algorithm, team, key, lane, ranks, source, behind, without, progress)


def install_engine(manager: RecoveryManager, attachment: Attachment, opened: OpenedGroups) -> Engine:
    """An engine on these groups, not in place yet. Collective, unless the groups were prepared.

    Raises:
        CommunicationError: a member is lost, or the members have changed.
    """
    old, team, lane, ranks, source = attachment.engine, opened.team, opened.lane, opened.ranks, opened.source
    inventory, config = old.inventory, old.config
    old.binding.release_buckets()
    lead = ranks[source]
    config = replace(config, **{name: lead[name] for name in _MEASURED})
    with unless_it_fails(inventory.trainable.values(), lane, remember=False):
        order, notices = ranks[source]["order"], old.state.notices
        engine = Engine(
            config,
            opened.algorithm,
            inventory,
            old.optimizers,
            team,
            lane,
            opened.key,
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
    align(manager, ranks, source, {*opened.behind, *opened.without}, team.rank)
    if manager.newcomer:
        manager.progress.receive(opened.progress)
    if manager.newcomer or engine.algorithm.payload is Payload.GRAD:
        manager.loss_scale.receive(ranks[source]["loss_scale"])
    if manager.newcomer and engine.state.loss_scale is None and (told := ranks[source]["loss_scale"]):
        engine.tracker.units.load(told["scale"])
    free = ranks[source]["lost_step"] == LostStep.FREE.value
    begins = engine.step if free else begun(ranks[source])
    manager.progress.divide(begins, team.rank, team.size)
    return engine


def _progress_of(
    manager: RecoveryManager, team: Team, ranks: Sequence[dict[str, Any]], source: int, wanted: bool
) -> bytes:
    """How far the user's loop is on rank `source`; empty if no rank has to know. Collective."""
    if not wanted and not any(each["newcomer"] for each in ranks):
        return b""
    mine = manager.progress.report() if team.rank == source else b""
    return team.all_gather_bytes("progress of the training loop", mine)[source]


@torch.no_grad()
def _take_over(engine: Engine, old: Engine) -> None:
    """What `old` keeps goes on in `engine`."""
    engine.followed.take_over(old.followed)
    engine.carry_statistics(old)
    engine.state.paused = old.state.paused
    tensors = engine.memory.tensors
    for (name, index), tensor in kept_tensors(old).items():
        engine.memory.tensor(name, engine.buckets[index], tensor)
        tensors[name, index].copy_(tensor)
    carry_errors(old.memory.states, engine.memory.states)
    engine.tracker.units.take_over(old.tracker.units)
    if engine.buckets:
        engine.algorithm.on_members_changed(engine.context)
    if old.tracker.ending:
        engine.tracker.go_on_ending()
