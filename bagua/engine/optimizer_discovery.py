"""Tracks the optimizers that train a module: those passed to `distribute`, and those made later."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bagua.engine.hooks import Attachment, attachments, hook_optimizer
from bagua.engine.startup.sharded import check_sharded
from bagua.engine.stray_parameters import tell_of_strays

__all__ = ["follow_optimizers", "trains"]

# Optimizers that need no look, with the sizes of their groups and the number of attachments at the last look.
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, ...]] = weakref.WeakKeyDictionary()
_handles: list[Any] = []


def follow_optimizers() -> None:
    """From now on look at every optimizer of this process before it steps."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_any_step))


def trains(attachment: Attachment, optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` holds a parameter that the module trains."""
    return bool(_held(attachment, optimizer))


def _before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    # The hooks that this may give to the optimizer run in this very step: torch runs the global ones first.
    look = (Attachment.count, *[len(group["params"]) for group in optimizer.param_groups])
    if _seen.get(optimizer) == look:
        return
    settled = True
    for attachment in attachments.all():
        engine = attachment.engine
        if any(each is optimizer for each in engine.optimizers):
            continue
        held = _held(attachment, optimizer)
        if held and engine.tracker.nesting.within:
            settled = False  # a part of another's step now, perhaps not the next time
        elif held:
            _adopt(attachment, optimizer, held)
    if settled:
        _seen[optimizer] = look
        tell_of_strays(optimizer)


def _adopt(attachment: Attachment, optimizer: torch.optim.Optimizer, held: set[int]) -> None:
    """Let the steps of `optimizer` be steps of the module, instead of those of optimizers of the same parameters.

    One that steps again after another took its place stays beside it.

    Raises:
        RuntimeError: the algorithm cannot train with it.
    """
    engine = attachment.engine
    again = optimizer in attachment.replaced
    gone = [
        number
        for number, ref in enumerate(engine.followed.refs)
        if (each := ref()) is None or (not again and _held(attachment, each) <= held)
    ]
    after = [each for number, ref in enumerate(engine.followed.refs) if number not in gone and (each := ref())]
    try:
        for algorithm in (engine.state.root, engine.state.algorithm):
            check_sharded([optimizer], algorithm)
        engine.state.root.check(engine.inventory.trainable, [*after, optimizer])
        engine.state.root.check_sparse(engine.inventory.sparse, [*after, optimizer])
    except ValueError as error:
        raise RuntimeError(
            f"{type(optimizer).__name__} was not given to bagua.distribute() and steps with the module's parameters: "
            f"{error}; call bagua.distribute() again with it, on all ranks"
        ) from error
    for number in gone:
        old = engine.followed.refs[number]()
        if old is not None:
            attachment.replaced.add(old)
            _seen.pop(old, None)
        for handle in attachment.step_hooks.pop(number, ()):
            handle.remove()
    hook_optimizer(attachment, engine.followed.adopt(optimizer, gone), optimizer)
    # One optimizer for each of several parts may follow, of which this is the first.
    engine.followed.expects_more = not attachment.stepped <= set().union(
        *(_held(attachment, each) for each in engine.optimizers)
    )
    engine.state.notice(
        f"{type(optimizer).__name__}, not given to bagua.distribute(), steps with the module's parameters and is "
        "tracked from now on; its options and state were not compared between ranks, and defaults that depend on the "
        "optimizer were chosen without it"
    )


def _held(attachment: Attachment, optimizer: torch.optim.Optimizer) -> set[int]:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return held & attachment.trained
