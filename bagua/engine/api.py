"""`bagua.distribute` and `bagua.detach`: attach an engine to a module, and remove it."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from bagua.algorithms.base import Algorithm, Payload
from bagua.autotune import Autotune
from bagua.comm import error_file
from bagua.comm.groups import Groups
from bagua.comm.shutdown import before_exit
from bagua.comm.team import Team
from bagua.comm.transport import goes_native, lanes_over, may_fall_back, why_gloo, why_no_transport
from bagua.engine.averaging import mean_optimizers
from bagua.engine.buffers import tell_of_sparse_buffers
from bagua.engine.distributed_module import attachment_of
from bagua.engine.engine import Engine
from bagua.engine.glance import describe
from bagua.engine.guard import Guard
from bagua.engine.hooks import Attachment, attach, attachments
from bagua.engine.inference_mode import outside_inference
from bagua.engine.lanes.selection import make_lane
from bagua.engine.max_norm import tell_of_max_norm
from bagua.engine.optimizer_discovery import follow_optimizers
from bagua.engine.recovery.catch_up import unless_interrupted
from bagua.engine.recovery.interruptible import run_interruptibly
from bagua.engine.recovery.limits import check_tolerates, take_seat, without_mixed_halves
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.recovery.options import FaultTolerance, as_fault_tolerance, seat_of
from bagua.engine.recovery.reopen import follow_membership, join_job
from bagua.engine.startup.broadcast import replicate_optimizers, replicate_tensors
from bagua.engine.startup.choice import chooser_of, why_no_choice
from bagua.engine.startup.handshake import Agreement, shake_hands
from bagua.engine.startup.inventory import Inventory
from bagua.engine.startup.link_probe import Links, probe_links
from bagua.engine.startup.rank_order import RankOrder, arrange, why_no_order
from bagua.engine.startup.request import Request
from bagua.engine.startup.rollback import unless_it_fails
from bagua.engine.tuning.saved_results import check_files, session_of
from bagua.engine.tuning.search_space import hierarchy_is_free
from bagua.engine.tuning.site_trial import flat_of, tries
from bagua.engine.unheld_parameters import tell_of_unheld_parameters
from bagua.membership.epoch import FIRST_EPOCH
from bagua.optim import unfix_second_moments
from bagua.status.rank_status import serve_rank

__all__ = ["detach", "distribute"]

_STOP_S = 1.0  # at the end of the process, for a lane that is still busy
_log = logging.getLogger("bagua")
_M = TypeVar("_M", bound=nn.Module)


@outside_inference
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
    gradient_as_bucket_view: bool = True,
    rank_order: RankOrder = None,
    routes: str | None = None,
    transport: str | None = None,
    autotune: Autotune | bool | dict[str, Any] | str | os.PathLike[str] | None = None,
    fault_tolerant: FaultTolerance | bool | None = None,
    **algorithm_options: Any,
) -> _M:
    """Distribute `module`: from now on backward passes and optimizer steps communicate as `algorithm` says.

    Collective: call it on all ranks with the same arguments. It returns the same module object with unchanged
    `state_dict` keys and broadcasts rank 0's parameters, buffers and optimizer state. Gradients are reduced during
    `backward()`. Your training loop needs no other change.

    Call it again to switch the algorithm during training. If replicas differ then, parameters and the floating-point
    tensors of the optimizers' state are averaged first. If the switch raises, the previous algorithm stays in use.

    Args:
        module: a module on its final device, with all trainable parameters on that device.
        optimizers: one or several optimizers; each must hold a parameter of the module. An optimizer made later is
            followed from its first step on, but not compared between ranks. Pass [] if no optimizer steps the module:
            each backward pass then counts as a step.
        algorithm: a name from `bagua.algorithms.available()`, an instance, or "auto": measure, and choose. See
            `bagua.algorithms.Auto` for its options `allow` and `max_loss_gap`, and `bagua.explain` for the choice.
        process_group: a `ProcessGroup` or one-dimensional `DeviceMesh`. Default: the default group or, for a switch,
            the previous group.
        bucket_bytes: bucket size in bytes. Default: BAGUA_DEFAULT_BUCKET_SIZE, or 10 % of the parameter bytes, at least
            1 MiB and at most 10 MiB. Where a bucket of gradients is cut into a compressed chunk for each rank, at least
            256 KiB for each of them, while there are two buckets; not with `fault_tolerant`.
        num_lanes: number of exchanges in flight at once on a CPU. Each lane is a communication thread with connections
            of its own (with NCCL, a CUDA stream). Default: BAGUA_NUM_LANES, or 1 to 8 by codec and measured latency
            (docs/launching.md).
        hierarchical: average exactly within a node and use the algorithm's exchange between nodes. Default: the
            algorithm's own.
        guard: measure the compression error periodically, and fall back if it is too large. Default: neither.
        broadcast_buffers: broadcast rank 0's buffers, such as running statistics, before each forward pass in training
            mode but those after a pass in `no_sync`, as DDP does. All ranks wait for it.
        static_graph: promise that every step uses the same parameters, each as often as in the first step. A rank that
            leaves some out then asks only once, in torch's `TCPStore`, what the others used; and reentrant checkpoints
            may share weights.
        gradient_as_bucket_view: True makes `.grad` a view of a bucket, which the next backward pass overwrites. False
            copies the mean to the tensor that was `.grad`, so gradients kept over `zero_grad()` do not change. This
            costs a copy per pass and memory for all gradients. No effect with algorithms that exchange weights.
        rank_order: order of the ranks in rings, for hosts with links of different rates: "measured" measures all links
            once (seconds for each host, on slow links) and takes the ring whose slowest link is the fastest; a list of
            all ranks gives the order. Only the order of sums changes, and who is whose neighbour in gossip. Default:
            BAGUA_RANK_ORDER, or the order of the ranks; for a switch, the previous order.
        routes: "measured": measure all links, and let pairs of hosts whose own link is slow send through a third host
            where that is clearly faster (docs/sites.md); over the native transport only. "direct": never. Changes no
            bit. Default: BAGUA_ROUTES, or as `rank_order`: "measured" if that is; for a switch, the previous routes.
        transport: "native": on a CPU, compressed rows, sums and gossip go over sockets of their own, in compiled code,
            with the same bits as over "gloo" (docs/performance.md). Default: BAGUA_TRANSPORT or, for a switch, the
            previous one, or "native" if all ranks have it.
        autotune: measure bucket sizes and other settings in the first steps and keep the fastest. True, a
            `bagua.Autotune`, a dict of its arguments, or the path of a results file. Only the order of sums changes.
            Default: BAGUA_AUTOTUNE, or off.
        fault_tolerant: True or options: if a rank is lost, the others train on in the same processes
            (docs/fault_tolerance.md). Needs `bagua run --fault-tolerant`. Default: off.
        **algorithm_options: options of the named algorithm. See docs/algorithms/NAME.md, or help() of its class:
            `bagua.algorithms.ByteGrad` for "bytegrad", `AsyncModelAverage` for "async" and so on (docs/algorithms.md).

    Returns:
        `module`.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        ValueError, TypeError: an argument is wrong; the message names it. `RankMismatchError`, a ValueError: ranks
            hold different parameters or options, or the arguments of another rank are wrong.
        CommunicationError: a rank did not call it within the group's timeout.

    Examples:
        >>> bagua.init_process_group()
        >>> model = torch.nn.Linear(10, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> model = bagua.distribute(model, optimizer, "bytegrad")
        >>> inputs = torch.randn(4, 10)
        >>> model(inputs).square().mean().backward()  # averages the gradients over the ranks
        >>> optimizer.step()
    """
    error_file.install()  # scripts without bagua.init_process_group, as fault-tolerant ones, have no other place
    tolerance = as_fault_tolerance(fault_tolerant)
    previous = attachments.get(module) if isinstance(module, nn.Module) and attachments.is_root(module) else None
    if process_group is None and previous is not None:
        process_group = previous.process_group
    if previous is not None:
        if previous.before_step is not None:
            raise ValueError(f"module: {type(module).__name__} is fault-tolerant, and keeps its algorithm and options")
        if tolerance is not None:
            raise ValueError("fault_tolerant: the module is distributed already; call bagua.detach() first")
        previous.engine.failures.leave_broken_pass()
    if hierarchical is not None:
        algorithm_options["hierarchical"] = hierarchical
    problem: Exception | None = None
    request = Request(
        bucket_bytes,
        num_lanes,
        guard,
        broadcast_buffers,
        static_graph,
        gradient_as_bucket_view,
        rank_order,
        routes,
        transport=transport,
        tolerates_over=None if tolerance is None else tolerance.backend,
    )
    try:
        request.check(module, optimizers, algorithm, algorithm_options, autotune)
    except (ValueError, TypeError) as error:
        problem = error  # the other ranks must hear of it before it is raised
    inventory = request.inventory
    device = inventory.device if inventory is not None else _any_device(module)
    manager = None if tolerance is None else RecoveryManager(seat_of(tolerance), tolerance)
    if manager is not None:
        problem = problem or check_tolerates(request, module, process_group is not None, manager.seat)
        manager.transport = request.transport
        manager.algorithm = request.algorithm = without_mixed_halves(request.algorithm)

    def begin(team: Team, signature: list[Any]) -> Engine:
        """Compare the arguments, replicate the state, and make an engine. Collective."""
        failed = problem or check_files(request.tune, team.rank) or why_no_choice(request, team)
        failed = failed or why_no_order(request.rank_order, request.routes, team)
        failed = failed or why_no_transport(request.transport, team, device)
        ready = previous is not None and not previous.engine.failed
        before = None if previous is None else previous.engine.groups
        over_gloo = before is not None and before.size > 1 and not before.native
        why = why_gloo(request.transport, team, device, over_gloo)
        agreement = shake_hands(team, signature, request.describe(complete=failed is None), failed, ready, why)
        native = goes_native(team, agreement.over_gloo)
        team, lines = _arranged(team, agreement, request, previous, native)
        return _make_engine(module, team, agreement, request, previous, signature, manager, native, lines)

    joins = False
    if manager is None:
        engine = begin(Team.of(process_group, device), request.signature())
    else:
        engine, joins = _begin_tolerantly(manager, device, partial(begin, signature=request.signature()))
    follow_optimizers()
    if previous is not None:
        for listener in previous.engine.tracker.listeners.active:
            listener.engine_ends(replaced=True)
        previous.remove_hooks()
    attachments[module] = attach(module, engine, request.optimizers, process_group)
    serve_rank(lambda: describe(live_engines()))
    if manager is not None:
        take_seat(manager.seat)
        follow_membership(module, attachments[module], manager)
        if joins:
            join_job(module, manager)
    if previous is not None:
        previous.engine.close()
    before_exit(_stop_lanes)
    atexit.unregister(_stop_lanes)
    atexit.register(_stop_lanes)  # for scripts that did without bagua.init_process_group()
    engine = attachments[module].engine
    tell_of_max_norm(module, engine)
    tell_of_unheld_parameters(engine, request.optimizers)
    tell_of_sparse_buffers(engine)
    _log.debug("rank %d: %s distributed with %r", engine.team.rank, type(module).__name__, engine.state.root)
    return module


def _begin_tolerantly(
    manager: RecoveryManager, device: torch.device, begin: Callable[[Team], Engine]
) -> tuple[Engine, bool]:
    """An engine with the members of the job, and False.

    One that is alone, and True, for a rank that arrives, or if a member is lost meanwhile. It has to open groups with
    those that are left, as after any loss. So has a rank that comes here after a loss, whether others have been here
    before it or not: all ranks of an epoch must do the same.

    Raises:
        RankMismatchError: of `begin`; no rank is lost then.
    """
    view = manager.await_member()
    manager.newcomer = view.rank is None
    founds = not manager.newcomer and view.group == FIRST_EPOCH
    if not manager.newcomer:
        manager.replicated = founds and view.rank == 0
    if founds:
        try:
            return begin(manager.open_team(view, device)), False
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            manager.exchange_failed(f"bagua.distribute(): {error}", loses_step=False)
    return begin(Team.alone()), True


def _arranged(
    team: Team, agreement: Agreement, request: Request, previous: Attachment | None, native: bool
) -> tuple[Team, tuple[str, ...]]:
    """The team with the order of its groups and its routes, and lines about them. Collective."""
    if previous is not None and previous.engine.team.name == team.name and request.arrangement_is_default:
        before = previous.engine.team
        return team.arranged(before.order, before.routes), ()
    assert request.inventory is not None
    found = arrange(request.rank_order, request.routes, team, agreement.nodes, request.inventory.device, native)
    if team.rank == 0:
        for line in found.lines:
            _log.info("%s", line)
    return team.arranged(found.order, found.routes), found.lines


def _make_engine(
    module: nn.Module,
    team: Team,
    agreement: Agreement,
    request: Request,
    previous: Attachment | None,
    signature: list[Any],
    manager: RecoveryManager | None,
    native: bool,
    lines: tuple[str, ...],
) -> Engine:
    """Replicate the state of rank 0, and make an engine. Collective over the team."""
    chosen, inventory, guard, tune = request.algorithm, request.inventory, request.guard, request.tune
    assert inventory is not None and chosen is not None
    tunes_hierarchy = tune is not None and hierarchy_is_free(chosen, agreement.nodes)
    given = chosen
    chosen, remark = chosen.for_nodes(agreement.nodes)
    flat = flat_of(given, chosen, agreement.nodes) if manager is None and tune is None else None
    if remark and team.rank == 0 and not (manager is not None and manager.newcomer):  # whose nodes come later
        _log.warning("%s: %s", chosen.name, remark)

    order: Sequence[str] | None = None
    differing = False
    if previous is not None:
        known = previous.engine.state.order
        order = known if known is not None and set(known) == set(inventory.trainable) else None
        differing = agreement.all_ready and previous.engine.replicas.differ
        previous.engine.settle(average=agreement.all_ready)  # of weights that differ, all ranks get the mean
    key = team.next_lane()
    fallback = guard.fallback_on(agreement.nodes) if guard is not None else None
    hierarchical_groups = tunes_hierarchy or any(
        each.hierarchical_groups for each in (chosen, fallback) if each is not None
    )
    groups = team.open(
        f"lane/{key}", hierarchical_groups, agreement.nodes, native, or_gloo=may_fall_back(request.transport)
    )
    with team.naming_missing_ranks("bagua.distribute()", f"failed/{key}", groups):
        if manager is None or team.size == 1:
            links = _replicate(team, groups, inventory, request.optimizers, differing)
        else:
            links = _replicate_tolerantly(team, groups, inventory, request.optimizers, manager)
        num_lanes, mesh = request.num_lanes, groups.world.mesh
        assert num_lanes is not None
        if request.chooses_lanes and manager is None:  # a newcomer, which is alone at first, would choose others
            num_lanes = lanes_over(team, mesh, links.round_trip_s, num_lanes)
    for meter in groups.meters:
        meter.sent = meter.received = 0  # what follows is training
    lane = make_lane(groups, inventory.device)
    if manager is None:  # with fault tolerance the number of ranks changes
        request.fit_buckets(chosen, agreement.nodes)
    tries_sites = flat is not None and tries(team, agreement.nodes, inventory.device)
    config = request.config(num_lanes, links, tunes_hierarchy, team.size, mesh is not None, flat, tries_sites)
    notices = (*((remark,) if remark else ()), *_unfixed(request.optimizers), *lines)
    in_buckets = previous is not None and previous.engine.algorithm.payload is Payload.PARAM
    with unless_it_fails(inventory.trainable.values(), lane, remember=in_buckets):
        tuning = session_of(tune, team, module, chosen, signature, agreement.nodes)
        return Engine(
            config,
            chosen,
            inventory,
            request.optimizers,
            team,
            lane,
            key,
            order,
            notices,
            tuning,
            manager,
            chooser=chooser_of(chosen),
        )


def _unfixed(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Fit loaded moments to Adam; what is told of it. All ranks hold rank 0's state by now."""
    scaled = sum(map(unfix_second_moments, optimizers))
    what = f"optimizers: second moments of {scaled} parameters were fixed by the optimizer that saved them"
    return [f"{what}; they were scaled for one that updates them"] if scaled else []


def _replicate_tolerantly(
    team: Team,
    groups: Groups,
    inventory: Inventory,
    optimizers: Sequence[torch.optim.Optimizer],
    manager: RecoveryManager,
) -> Links:
    """As `_replicate`, until the members change. Then this rank has its own state again, not half of rank 0's."""
    found: list[Links] = []

    def replicate() -> None:
        found.append(_replicate(team, groups, inventory, optimizers, differing=False))

    with unless_interrupted(inventory, optimizers) if team.rank else nullcontext():
        run_interruptibly(groups, replicate, manager.check_group)
    manager.replicated = True
    return replace(found[0], held_bytes=0.0)  # a newcomer, which is alone at first, would find another number of lanes


def detach(module: _M) -> _M:
    """Undo `distribute`: remove all hooks and give parameters and gradients storage of their own.

    Call it on all ranks, between steps. To continue with the same algorithm later, save `bagua.state_dict` first.

    Returns:
        `module`, a plain module again.

    Raises:
        ValueError: `module` is not distributed.

    Examples:
        >>> model = bagua.detach(model)
        >>> torch.save(model, path)
    """
    attachment = attachment_of(module)
    for listener in attachment.engine.tracker.listeners.active:
        listener.engine_ends(replaced=False)
    attachment.remove_hooks()
    del attachments[module]
    if attachment.engine.failures.recovery is not None:
        attachment.engine.failures.recovery.stop(_STOP_S)
    attachment.engine.close()
    return module


def live_engines() -> list[Engine]:
    """All engines of this process."""
    return [attachment.engine for attachment in attachments.all()]


def _stop_lanes() -> None:
    """Stop lanes at exit: threads inside a collective at interpreter shutdown would abort the process."""
    for engine in live_engines():
        engine.stop(_STOP_S)


def _replicate(
    team: Team,
    groups: Groups,
    inventory: Inventory,
    optimizers: Sequence[torch.optim.Optimizer],
    differing: bool,
) -> Links:
    """Broadcast rank 0's tensors and optimizer state (the mean of state that differs); return what it told."""
    tensors = [*inventory.parameters.values(), *inventory.frozen.values(), *inventory.buffers.values()]
    links = probe_links(
        team,
        groups,
        sum(tensor.nbytes for tensor in tensors),
        lambda: replicate_tensors(tensors, groups.world, inventory.device),
        inventory.device,
    )
    equalise = mean_optimizers if differing else replicate_optimizers
    equalise(optimizers, {**inventory.parameters, **inventory.frozen}, team, groups.world, inventory.device)
    return links


def _any_device(module: Any) -> torch.device:
    """A device for the handshake if the module's own cannot be determined."""
    params = module.parameters() if isinstance(module, nn.Module) else ()
    return next((param.device for param in params if param.device.type in ("cpu", "cuda")), torch.device("cpu"))
