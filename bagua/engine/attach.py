"""Put an engine on a module, and take it off again: the functions that users call."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from bagua import algorithms
from bagua.algorithms.base import Algorithm
from bagua.autotune import Autotune, as_options
from bagua.comm.goodbye import before_exit
from bagua.comm.team import Team
from bagua.engine.attachment import Attachment, attach, attachments
from bagua.engine.bucket import Bucket
from bagua.engine.buffers import check_broadcast
from bagua.engine.engine import Engine
from bagua.engine.handshake import shake_hands
from bagua.engine.lane import make_lane
from bagua.engine.link import lanes_of_sums
from bagua.engine.params import Inventory, as_optimizers, take_inventory
from bagua.engine.plan import LANES_OF_WIDE, check_num_lanes, default_num_lanes, fitting_bucket_bytes, lanes_are_given
from bagua.engine.quality import Guard
from bagua.engine.replicate import replicate_optimizers, replicate_tensors
from bagua.engine.results import check_files, tuning_of
from bagua.engine.scope import hierarchy_is_free
from bagua.engine.sparse import check_sparse
from bagua.engine.stats import Stats

__all__ = ["abort", "average", "detach", "distribute", "load_state_dict", "no_sync", "resume", "state_dict", "stats"]

_STOP_S = 1.0  # at the end of the process, for a lane that is still busy
_log = logging.getLogger("bagua")
_M = TypeVar("_M", bound=nn.Module)


def distribute(
    module: _M,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: str | Algorithm = "gradient_allreduce",
    *,
    process_group: Any = None,
    bucket_bytes: int | None = None,
    num_lanes: int | None = None,
    hierarchical: bool | None = None,
    guard: Guard | None = None,
    broadcast_buffers: bool = False,
    static_graph: bool = False,
    autotune: Autotune | bool | dict[str, Any] | str | os.PathLike[str] | None = None,
    **algorithm_options: Any,
) -> _M:
    """Train `module` data-parallel from now on. Collective: call it on all ranks with the same arguments.

    The same module object comes back, its `state_dict` keys unchanged. Parameters, buffers and optimizer state
    become equal to rank 0's. Calling it again switches the algorithm, in the middle of training if need be; where
    the replicas of the one before differ, parameters become their mean. Gradients are synchronised within
    `backward()`, hidden behind it; the loop needs no other change.

    Args:
        module: on its device already, all trainable parameters there.
        optimizers: one or several; each must hold a parameter of the module.
        algorithm: a name from `bagua.algorithms.available()` or an instance.
        process_group: a `ProcessGroup` or one-dimensional `DeviceMesh`; None is the default group, or, when
            switching, the group as before.
        bucket_bytes: payload that is exchanged at once; None takes BAGUA_DEFAULT_BUCKET_SIZE, or a tenth of all
            from 1 MiB up to 10 MiB.
        num_lanes: exchanges that are under way at once on gloo, each with connections of its own; None takes
            BAGUA_NUM_LANES or 4, of which exchanges with 8 bits an element or more use 3, and plain sums fewer where
            the network is faster than the CPU.
        hierarchical: exact within a node, the algorithm's exchange between nodes; None is the algorithm's default.
        guard: measure every so often what compression loses, and fall back when it is too much; None does neither.
        broadcast_buffers: give everyone rank 0's buffers (running statistics, say) before each forward pass in
            training mode that is to be synchronised; all ranks wait for that.
        static_graph: every step uses the same parameters, each as often as in the first one. Then ranks that leave
            some of them out need not ask each other again, and reentrant checkpoints may share weights.
        autotune: find out in the first steps which sizes and numbers exchange fastest here, and keep them: True, a
            `bagua.Autotune` or a dict of its arguments, or the path of a file of results. What is exchanged stays the
            same but for the order of sums. None does what BAGUA_AUTOTUNE says, which is nothing if it is not set.
        **algorithm_options: options of the named algorithm.

    Returns:
        `module`.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        ValueError, TypeError: an argument is wrong; see the message. `RankMismatchError` (a ValueError): ranks
            hold different parameters or options, or another rank's arguments are wrong.
        CommunicationError: a rank did not come within the group's timeout.
    """
    previous = attachments.get(module) if isinstance(module, nn.Module) else None
    if process_group is None and previous is not None:
        process_group = previous.process_group
    problem: Exception | None = None
    chooses_lanes = False
    inventory: Inventory | None = None
    items: tuple[torch.optim.Optimizer, ...] = ()
    chosen: Algorithm | None = None
    tune: Autotune | None = None
    try:
        if hierarchical is not None:
            algorithm_options["hierarchical"] = hierarchical
        chosen = algorithms.get(algorithm, **algorithm_options)
        if bucket_bytes is not None:
            _check_bucket_bytes(bucket_bytes)
        chooses_lanes = num_lanes is None and not lanes_are_given()
        num_lanes = default_num_lanes() if num_lanes is None else check_num_lanes("num_lanes", num_lanes)
        if not isinstance(guard, Guard | None):
            raise TypeError(f"guard: expected a bagua.Guard or None, got {type(guard).__name__}")
        for name, value in (("broadcast_buffers", broadcast_buffers), ("static_graph", static_graph)):
            if not isinstance(value, bool):
                raise TypeError(f"{name}: expected True or False, got {value!r}")
        tune = as_options(autotune)
        if broadcast_buffers:
            check_broadcast(chosen)
        items = as_optimizers(optimizers)
        inventory = take_inventory(module, items, chosen.payload)
        if bucket_bytes is None:
            bucket_bytes = fitting_bucket_bytes(sum(param.nbytes for param in inventory.trainable.values()))
        chosen.check(inventory.trainable, items)
        chosen.check_sparse(inventory.sparse, items)
        check_sparse(inventory.sparse, chosen, guard.fallback_on(((0,),)) if guard is not None else None)
    except (ValueError, TypeError) as error:
        problem = error  # the other ranks must hear of it before it is raised
    device = inventory.device if inventory is not None else _any_device(module)
    team = Team.of(process_group, device)
    problem = problem or check_files(tune, team.rank)
    signature = inventory.signature() if inventory is not None else []
    options = {
        "algorithm": repr(chosen),
        "bucket_bytes": str(bucket_bytes),
        "num_lanes": f"{num_lanes} by default" if chooses_lanes else str(num_lanes),
        "guard": repr(guard),
        "broadcast_buffers": str(broadcast_buffers),
        "static_graph": str(static_graph),
        "autotune": repr(tune),
        "optimizers": ", ".join(f"{type(item).__name__} of {len(item.param_groups)} groups" for item in items),
    }
    ready = previous is not None and not previous.engine.failed
    agreement = shake_hands(team, signature, options, problem, ready)
    assert inventory is not None and chosen is not None
    assert bucket_bytes is not None and num_lanes is not None
    tunes_hierarchy = tune is not None and hierarchy_is_free(chosen, agreement.nodes)
    chosen, remark = chosen.for_nodes(agreement.nodes)
    if remark and team.rank == 0:
        _log.warning("%s: %s", chosen.name, remark)

    order: Sequence[str] | None = None
    if previous is not None:
        known = previous.engine.learned_order
        order = known if known is not None and set(known) == set(inventory.trainable) else None
        if agreement.all_ready:
            previous.engine.average()  # rank 0's weights are about to become everyone's: let them be the mean
        detach(module)
    key = team.next_lane()
    fallback = guard.fallback_on(agreement.nodes) if guard is not None else None
    hierarchical_groups = tunes_hierarchy or any(
        each.hierarchical_groups for each in (chosen, fallback) if each is not None
    )
    groups = team.open(f"lane/{key}", hierarchical_groups, agreement.nodes)
    tensors = [*inventory.parameters.values(), *inventory.frozen.values(), *inventory.buffers.values()]
    few_lanes = lanes_of_sums(
        team,
        agreement.nodes,
        sum(tensor.nbytes for tensor in tensors),
        lambda: replicate_tensors(tensors, groups.world, inventory.device),
    )
    everything = {**inventory.parameters, **inventory.frozen}
    replicate_optimizers(items, everything, team, groups.world, inventory.device)
    for meter in groups.meters:
        meter.sent = meter.received = 0  # what follows is training
    lane = make_lane(groups, inventory.device)
    notices = (remark,) if remark else ()
    engine = Engine(chosen, inventory, items, team, lane, bucket_bytes, key, order, notices, guard, num_lanes)
    if chooses_lanes:
        engine.lanes_of_sums, engine.lanes_of_wide = few_lanes, LANES_OF_WIDE
    engine.tunes_hierarchy = tunes_hierarchy
    engine.tuning = tuning_of(tune, team, module, chosen, signature, agreement.nodes)
    engine.backward.static_graph = static_graph
    engine.broadcasts_buffers = broadcast_buffers and team.size > 1 and bool(inventory.buffers)
    attachments[module] = attach(module, engine, items, process_group)
    before_exit(_stop_lanes)
    atexit.unregister(_stop_lanes)
    atexit.register(_stop_lanes)  # for scripts that did without bagua.init_process_group()
    _log.debug("rank %d: %s distributed with %r", team.rank, type(module).__name__, chosen)
    return module


def detach(module: _M) -> _M:
    """Make `module` a plain module again: no hooks, its values and gradients in storage of their own.

    Call it on all ranks, between steps. Checkpoint the algorithm's state first if you mean to come back to it.

    Returns:
        `module`.

    Raises:
        ValueError: it is not distributed.
    """
    attachment = _attachment(module)
    attachment.remove_hooks()
    del attachments[module]
    attachment.engine.close()
    return module


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Within it, backward passes only accumulate gradients on this rank; the next one outside synchronises the sum.

    What counts is where `backward()` runs, not `forward()`.

    Raises:
        ValueError: `module` is not distributed.
    """
    backward = _attachment(module).engine.backward
    before, backward.sync = backward.sync, False
    try:
        yield
    finally:
        backward.sync = before


def abort(module: nn.Module) -> None:
    """Let nothing run in the background any more on this rank, until `resume`: for evaluation, say.

    For algorithms that exchange beside training ("async"). What is under way is called off, or completed if all
    ranks take part already; the ranks agree which it is. Other ranks are not waited for and train on. Call it between
    steps. Replicas stay as they are; see `average`.

    Raises:
        ValueError: `module` is not distributed.
    """
    _attachment(module).engine.pause(True)


def resume(module: nn.Module) -> None:
    """Undo `abort`; no effect without one. Waits for nobody.

    Raises:
        ValueError: `module` is not distributed.
    """
    _attachment(module).engine.pause(False)


def average(module: nn.Module) -> None:
    """Give every rank the mean of all ranks' weights: before evaluating or saving one model. Collective.

    For algorithms whose replicas differ; no effect where they are equal anyway. Ranks may be at different steps.
    Buffers are left alone.

    Raises:
        ValueError: `module` is not distributed.
        CommunicationError: a rank did not come within the group's timeout; names it, and nothing was changed.
    """
    _attachment(module).engine.average()


def stats(module: nn.Module) -> Stats:
    """Return bytes, seconds and compression of the module's communication on this rank, last step and total.

    Raises:
        ValueError: `module` is not distributed.
    """
    return _attachment(module).engine.stats()


def state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the algorithm's own state on this rank (step, bucket plan, residuals, ...); plain data and tensors.

    Save it beside the module's and the optimizers' state dicts, on every rank: training then resumes with the
    same numbers.

    Raises:
        ValueError: `module` is not distributed.
    """
    return _attachment(module).engine.state_dict()


def load_state_dict(module: nn.Module, state: dict[str, Any]) -> None:
    """Put back what `state_dict` returned on the same rank, with the same algorithm and number of ranks.

    Raises:
        ValueError: `module` is not distributed, or the state was made under other circumstances.
    """
    _attachment(module).engine.load_state_dict(state)


def attached_algorithm(module: nn.Module) -> Algorithm:
    """Return the algorithm that `module` is trained with.

    Raises:
        ValueError: `module` is not distributed.
    """
    return _attachment(module).engine.algorithm


def attached_buckets(module: nn.Module) -> list[Bucket]:
    """Return the buckets of `module` in the order of exchange; none until the first pass has shown that order.

    Raises:
        ValueError: `module` is not distributed.
    """
    return list(_attachment(module).engine.buckets)


def live_engines() -> list[Engine]:
    """All engines of this process."""
    return [attachment.engine for attachment in list(attachments.values())]


def _stop_lanes() -> None:
    """Threads that are inside a collective when the interpreter goes down would abort the process."""
    for engine in live_engines():
        engine.stop(_STOP_S)


def _attachment(module: nn.Module) -> Attachment:
    try:
        return attachments[module]
    except (KeyError, TypeError):
        raise ValueError(f"{type(module).__name__} is not distributed; call bagua.distribute() first") from None


def _check_bucket_bytes(bucket_bytes: int) -> None:
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int):
        raise TypeError(f"bucket_bytes: expected an int, got {type(bucket_bytes).__name__}")
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes: expected a positive number of bytes, got {bucket_bytes}")


def _any_device(module: Any) -> torch.device:
    """A device to meet the others on although something is wrong with the module."""
    params = module.parameters() if isinstance(module, nn.Module) else ()
    return next((param.device for param in params if param.device.type in ("cpu", "cuda")), torch.device("cpu"))
