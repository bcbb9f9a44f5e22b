"""Uneven inputs: ranks that have run out of batches take part in the collectives of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from bagua.algorithms.base import Exactness, Payload
from bagua.comm.uneven import Uneven
from bagua.engine.announcer import Moment
from bagua.engine.buffers import broadcast_buffers
from bagua.engine.engine import Engine
from bagua.engine.hooks import Attachment, attachments
from bagua.engine.startup.broadcast import replicate_optimizers, replicate_tensors

__all__ = ["join"]


@contextmanager
def join(
    modules: nn.Module | Sequence[nn.Module],
    *,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Train with uneven inputs: inside this context ranks may run different numbers of batches. Collective.

    Wrap the loop over an epoch in it. A rank without further inputs still takes part in the exchanges of the others,
    with zero gradients or with its last weights. At the end, if gradients are exchanged, all ranks get the weights,
    buffers and optimizer state of a rank that ran the most batches. Gradients stay each rank's own: a rank that had no
    further inputs finds `.grad` as it left it.

    Args:
        modules: one or several distributed modules of one process group: all that are trained in the loop.
        divide_by_initial_world_size: divide the sum of gradients by the number of all ranks. False: by the number of
            ranks that still have inputs (one synchronised backward pass per step; use `bagua.no_sync` for others).
        enable: False does nothing.
        throw_on_early_termination: raise on all ranks as soon as one has no further inputs.

    Raises:
        ValueError: a module is not distributed, or its algorithm does not support it; the message names it.
        RuntimeError: a rank has no further inputs, with `throw_on_early_termination`; on all ranks.

    Examples:
        >>> batches = [inputs] * 3  # another rank may have 2
        >>> with bagua.join(model):
        ...     for batch in batches:
        ...         model(batch).sum().backward()
        ...         optimizer.step()
    """
    given = [modules] if isinstance(modules, nn.Module) else list(modules)
    for module in given:
        if module not in attachments:
            raise ValueError(f"join: {type(module).__name__} is not distributed; call bagua.distribute() first")
        if attachments[module].before_step is not None:
            raise ValueError(
                f"join: {type(module).__name__} is fault-tolerant, and all ranks need as many batches then"
            )
    if not given:
        raise ValueError("join: expected at least one module, got none")
    members = [(module, attachments[module]) for module in given]
    if enable:
        for module, attachment in members:
            _check(module, attachment.engine, divide_by_initial_world_size, throw_on_early_termination)
    members = [(m, a) for m, a in members if a.engine.algorithm.exactness is not Exactness.ASYNCHRONOUS]
    if not enable or not members:
        yield
        return
    joining = _Joining(members, divide_by_initial_world_size, throw_on_early_termination)
    try:
        with joining.uneven.context(True, throw_on_early_termination):
            yield
            joining.out_of_inputs = True
    finally:
        for _, attachment in members:
            attachment.engine.tracker.joining = None
            attachment.engine.tracker.buffers_due = True  # ranks ended with other passes
        joining.give_back_gradients()


class _Joining:
    """The modules of one join.

    Attributes:
        out_of_inputs: this rank has left its loop.
    """

    def __init__(self, members: list[tuple[nn.Module, Attachment]], divide_by_initial: bool, early: bool) -> None:
        self._members = members
        self._divide_by_initial, self.early = divide_by_initial, early
        self.out_of_inputs = False
        self._gradients: dict[int, list[tuple[nn.Parameter, Tensor | None]]] = {}  # before others' passes, by member
        first = members[0][1]
        self.uneven = Uneven(first.process_group, first.engine.inventory.device, self._replay, self._finish)
        for number, (_, attachment) in enumerate(members):
            attachment.engine.tracker.joining = _Announcer(self, number)

    def _replay(self, code: int, present: list[int]) -> None:
        number, kind = divmod(code - 1, len(Moment))
        module, engine = self._members[number][0], self._members[number][1].engine
        moment = Moment(kind)
        if moment is Moment.FORWARD:
            engine.tracker.forward_begins()
        elif moment is Moment.BUFFERS:
            broadcast_buffers(module, engine, present[0])
        elif moment is Moment.BACKWARD:
            self._keep_gradients(number, engine)
            engine.tracker.shadow_backward()
        else:
            engine.tracker.end_step()

    def _keep_gradients(self, number: int, engine: Engine) -> None:
        """Before passes of other ranks, which leave their mean in `.grad`, to which the next pass would add.

        Those in buckets are overwritten, so they are copied. This rank has no activations then.
        """
        if number in self._gradients or engine.algorithm.payload is not Payload.GRAD:
            return
        views = {id(view) for bucket in engine.state.buckets for view in bucket.views}
        self._gradients[number] = [
            (param, param.grad.clone() if id(param.grad) in views and param.grad is not None else param.grad)
            for param in engine.inventory.parameters.values()
        ]

    def give_back_gradients(self) -> None:
        """At the end: let `.grad` be what it was when this rank ran out of inputs."""
        for kept in self._gradients.values():
            for param, grad in kept:
                param.grad = grad
        self._gradients.clear()

    def _finish(self, last: list[int]) -> None:
        for _, attachment in self._members:
            engine = attachment.engine
            if len(last) < engine.team.size and engine.algorithm.payload is Payload.GRAD:
                _copy_from(engine, last[0])

    def gradient_scale(self, present: list[int], size: int) -> float:
        """Factor by which the mean over all ranks is multiplied."""
        return 1.0 if self._divide_by_initial else size / len(present)


class _Announcer:
    """Announces one engine's collectives to ranks without inputs. The engine holds it; it holds no engine."""

    def __init__(self, joining: _Joining, number: int) -> None:
        self._joining, self._number = joining, number
        self.scale = 1.0  # of the gradients of the pass in progress

    @property
    def early(self) -> bool:
        """Whether to announce each forward pass, so that one rank's end is noticed there."""
        return self._joining.early

    def announce(self, moment: Moment, size: int) -> int:
        """Announce a collective; returns the first rank that still has inputs."""
        joining = self._joining
        if joining.out_of_inputs:
            return 0
        present = joining.uneven.announce(1 + self._number * len(Moment) + moment)
        self.scale = joining.gradient_scale(present, size)
        return present[0]


def _check(module: nn.Module, engine: Engine, divide_by_initial: bool, early: bool) -> None:
    algorithm = engine.algorithm
    if algorithm.exactness is Exactness.ASYNCHRONOUS:
        if early:
            raise ValueError(
                f"join: {algorithm.name!r} does not synchronise the ranks, so none learns when another runs out "
                "of inputs"
            )
        return
    if algorithm.uneven and not early:
        raise ValueError(f"join: {algorithm.name!r} does not support uneven inputs: {algorithm.uneven}")
    if engine.binding.hand_overs and not early:
        raise ValueError(
            f"join: {algorithm.name!r} hands over to another algorithm at step {engine.binding.hand_overs[0]}"
        )
    if not divide_by_initial and algorithm.payload is not Payload.GRAD:
        raise ValueError(f"join: {algorithm.name!r} exchanges weights, so divide_by_initial_world_size does not apply")
    if not divide_by_initial and not getattr(algorithm, "average", True):
        raise ValueError(
            f"join: {algorithm.name!r} with average=False sums gradients, so divide_by_initial_world_size does "
            "not apply"
        )
    synced = next((name for name, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm)), None)
    if synced is not None and not early:
        raise ValueError(
            f"join: {synced!r} needs a batch on every rank; pass throw_on_early_termination=True to stop "
            "all ranks together"
        )


def _copy_from(engine: Engine, src: int) -> None:
    """Broadcast the weights, buffers and optimizer state of rank `src`."""
    inventory = engine.inventory
    tensors = [*inventory.parameters.values(), *inventory.buffers.values()]
    with engine.dispatcher.side_exchange("end of a join") as group:
        replicate_tensors(tensors, group, inventory.device, src)
        replicate_optimizers(engine.optimizers, inventory.parameters, engine.team, group, inventory.device, src)
