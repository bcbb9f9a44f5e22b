"""What ties a module to its engine: the hooks of the module, its parameters and its optimizers."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from bagua.engine.backward import Backward
from bagua.engine.buffers import broadcast_buffers
from bagua.engine.engine import Engine
from bagua.engine.moment import Moment


class Attachment:
    """An engine with the handles of all hooks that feed it."""

    def __init__(self, engine: Engine, process_group: Any) -> None:
        self.engine = engine
        self.process_group = process_group
        self.handles: list[Any] = []

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


# A module's hooks are plain functions that look the engine up here, so that the module can be copied and pickled
# (the copy is a plain module) and is collected when dropped.
attachments: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()


def attach(
    module: nn.Module, engine: Engine, optimizers: Sequence[torch.optim.Optimizer], process_group: Any
) -> Attachment:
    attachment = Attachment(engine, process_group)
    attachment.handles.append(module.register_forward_pre_hook(_before_forward))
    attachment.handles.append(module.register_forward_hook(_after_forward))
    backward = weakref.ref(engine.backward)
    for index, param in enumerate(engine.inventory.trainable.values()):
        attachment.handles.append(param.register_post_accumulate_grad_hook(_gradient_hook(backward, index)))
    for param in engine.inventory.sparse.values():
        attachment.handles.append(param.register_post_accumulate_grad_hook(_sparse_hook(backward)))
    for number, optimizer in enumerate(optimizers):
        before, after = _step_hooks(weakref.ref(engine), number)
        attachment.handles.append(optimizer.register_step_pre_hook(before))
        attachment.handles.append(optimizer.register_step_post_hook(after))
    return attachment


def _before_forward(module: nn.Module, _args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    attachment = attachments.get(module)
    if attachment is not None:
        engine = attachment.engine
        engine.hooks_ran = True
        if module.training:
            engine.forward_begins()
            if engine.broadcasts_buffers and engine.backward.sync:
                broadcast_buffers(module, engine, engine.announce(Moment.BUFFERS))


def _after_forward(module: nn.Module, _args: Any, output: Any) -> None:
    """Learn of the backward pass when it enters the module, not only when a first gradient comes out.

    On a rank that uses no parameter in this step no gradient ever comes; and in a reentrant checkpoint the first
    one comes within an inner pass, whose end is not the end.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    attachment = attachments.get(module)
    if attachment is not None and module.training:
        ref = weakref.ref(attachment.engine.backward)
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(_entry_hook(ref))


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):  # Hugging Face's outputs are dicts too
        for item in output.values():
            yield from _tensors_in(item)
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _tensors_in(item)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors_in(getattr(output, field.name))


def _entry_hook(ref: weakref.ref[Backward]) -> Any:
    def backward_enters(_grad: torch.Tensor) -> None:
        backward = ref()
        if backward is not None:
            backward.enter()

    return backward_enters


def _sparse_hook(ref: weakref.ref[Backward]) -> Any:
    def sparse_ready(_param: torch.Tensor) -> None:
        backward = ref()
        if backward is not None:
            backward.sparse_ready()

    return sparse_ready


def _gradient_hook(ref: weakref.ref[Backward], index: int) -> Any:
    def gradient_ready(_param: torch.Tensor) -> None:
        backward = ref()
        if backward is not None:
            backward.gradient_ready(index)

    return gradient_ready


def _step_hooks(ref: weakref.ref[Engine], number: int) -> tuple[Any, Any]:
    def before(*_: Any) -> None:
        engine = ref()
        if engine is not None:
            engine.step_begins()

    def after(*_: Any) -> None:
        engine = ref()
        if engine is not None:
            engine.optimizer_stepped(number)

    return before, after
