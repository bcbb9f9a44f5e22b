"""Ranks that lack what counts, and newcomers, take over the state of a rank that has it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bagua.algorithms.base import Algorithm
from bagua.comm.team import Team
from bagua.engine.engine import Engine
from bagua.engine.recovery.backup import Backup
from bagua.engine.recovery.differences import replicate_differences
from bagua.engine.recovery.interruptible import run_interruptibly
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.startup.broadcast import replicate_structure, replicate_tensors
from bagua.engine.startup.inventory import Inventory
from bagua.errors import CommunicationError

__all__ = ["catch_up", "go_on_without", "kept_tensors", "position_of", "unless_interrupted"]

_POLL_S = 0.005


def position_of(manager: RecoveryManager, engine: Engine) -> dict[str, Any]:
    """What the ranks tell each other of their place in training, as plain data.

    Keys: "round": exchanges that count; "step": steps completed; "ending": the optimizers have made one more, whose
    exchange is to be repeated; "attempts": steps begun; "means", "newcomer", "replicated": see `RecoveryManager`;
    "met": see `Meetings.last`;
    "lost_step": the rule of the algorithm in force; "loss_scale": see `LossScale`; "kept": name, bucket, shape and type
    of each of `kept_tensors`.
    """
    rule = _in_force(engine).lost_step
    return {
        "round": manager.round,
        "step": engine.step,
        "ending": engine.tracker.ending,
        "attempts": manager.attempts,
        "means": manager.means,
        "met": list(manager.meetings.last),
        "newcomer": manager.newcomer,
        "replicated": manager.replicated,
        "lost_step": None if rule is None else rule.value,
        "loss_scale": manager.loss_scale.report(),
        "kept": [
            [*key, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for key, tensor in kept_tensors(engine).items()
        ],
    }


def kept_tensors(engine: Engine) -> dict[tuple[str, int], Tensor]:
    """Tensors of the algorithm that outlive a change of the members, by name and bucket."""
    tensors, names = engine.memory.tensors, engine.algorithm.kept
    return {key: tensors[key] for key in sorted(tensors) if key[0] in names}


def _in_force(engine: Engine) -> Algorithm:
    """The algorithm of the step at which this rank is, which it has not bound yet if it has just been taken there."""
    root = engine.state.root
    scheduled = root.at_step(engine.step)
    return engine.algorithm if scheduled is root else scheduled


def _kept_like(engine: Engine, described: Sequence[Sequence[Any]]) -> dict[tuple[str, int], Tensor]:
    """Those of `kept_tensors` that another rank describes: this rank's own, or new ones."""
    mine, device = kept_tensors(engine), engine.inventory.device
    found: dict[tuple[str, int], Tensor] = {}
    for name, index, shape, dtype in described:
        tensor, kind = mine.get((name, index)), getattr(torch, dtype)
        fits = tensor is not None and list(tensor.shape) == shape and tensor.dtype is kind
        found[name, index] = tensor if tensor is not None and fits else torch.empty(shape, dtype=kind, device=device)
    return found


def catch_up(
    manager: RecoveryManager,
    engine: Engine,
    team: Team,
    ranks: Sequence[dict[str, Any]],
    source: int,
    behind: Sequence[int],
    progress: bytes,
) -> None:
    """The ranks `behind` take over state and place of rank `source`. Collective; the other ranks wait and send nothing.

    Args:
        engine: the one to be replaced, of this rank.
        ranks: what `position_of` says of each.
        progress: of the user's loop, on rank `source`.

    Raises:
        CommunicationError: a rank is lost, or the members have changed. A rank that was behind has its old state then.
    """
    if not behind:
        return
    involved = [source, *behind]
    if team.rank not in involved:
        _await(manager, team, behind)
        return
    place = involved.index(team.rank)
    store = team.store.under("catch_up")
    staged = engine.inventory.device.type == "cuda"
    part = Team(place, len(involved), store, team.timeout, "gloo", team.name, "", staged=staged, alert=team.alert)
    groups = part.open("state")
    inventory, device = engine.inventory, engine.inventory.device
    everything = {**inventory.parameters, **inventory.frozen}
    # Of a rank that is before the switch of a `Warmup`, or new, none may be there yet.
    kept = _kept_like(engine, ranks[source]["kept"]) if place else kept_tensors(engine)

    # One that has fetched the weights beside training, or lacks a step, may hold most of what it takes over.
    alike = any(ranks[rank]["replicated"] for rank in behind)
    give = replicate_differences if alike else replicate_tensors

    def replicate() -> None:
        state = replicate_structure(engine.optimizers, everything, part)
        # In one transfer: each has a comparison before, and a part of a message after, in which the link is idle.
        give([*everything.values(), *inventory.buffers.values(), *kept.values(), *state], groups.world, device)

    backup, manager.backup = manager.backup, None  # once: from here on this rank may hold something newer
    try:
        mine = partial(unless_interrupted, inventory, engine.optimizers, kept.values(), backup)
        with mine() if place else nullcontext():
            run_interruptibly(groups, replicate, manager.check_group)
            if place and (manager.blank or manager.round < ranks[source]["round"]):
                manager.weights_fetched(ranks[source]["round"])
        if place:  # also if these groups are never used
            lead = ranks[source]
            manager.round, engine.state.step, engine.tracker.ending = lead["round"], lead["step"], lead["ending"]
            engine.binding.go_on_with(_in_force(engine), kept)
            manager.progress.receive(progress)
            manager.replicated = True
            team.store.set(_key(team.rank), b"1")
        _await(manager, team, behind)
    finally:
        groups.leave(abort=True)


def go_on_without(manager: RecoveryManager, engine: Engine, lead: dict[str, Any], progress: bytes) -> None:
    """This rank keeps its state and goes on at the place of another one.

    Args:
        lead: what `position_of` says of that one.
        progress: of the user's loop there.

    Raises:
        CommunicationError: the members have changed.
    """
    if manager.round < lead["round"]:
        manager.weights_fetched(lead["round"])
    manager.round, engine.state.step = lead["round"], lead["step"]
    manager.progress.receive(progress)


def _key(rank: int) -> str:
    return f"caught_up/{rank}"


def _await(manager: RecoveryManager, team: Team, behind: Sequence[int]) -> None:
    """Return when these ranks have caught up, however long their transfers take."""
    deadline = time.monotonic() + manager.options.max_blocked_s
    while not team.store.check([_key(rank) for rank in behind]):
        manager.check_group()
        if time.monotonic() > deadline:
            raise CommunicationError(f"ranks {list(behind)} did not catch up")
        time.sleep(_POLL_S)


@contextmanager
def unless_interrupted(
    inventory: Inventory,
    optimizers: Sequence[torch.optim.Optimizer],
    kept: Iterable[Tensor] = (),
    backup: Backup | None = None,
) -> Iterator[None]:
    """Within it a rank takes over state; if that fails it has its own again, which may be needed.

    Args:
        kept: see `kept_tensors`.
        backup: of the weights and the optimizer state that it holds; None: it is made now.
    """
    backup = backup or Backup.of(inventory, optimizers)
    saved = [(tensor, tensor.detach().clone()) for tensor in kept]
    try:
        yield
    except BaseException:
        backup.restore(inventory, optimizers)
        with torch.no_grad():
            for tensor, old in saved:
                tensor.copy_(old)
        raise
