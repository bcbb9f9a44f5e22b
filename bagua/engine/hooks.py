"""Hooks on the module, its parameters and its optimizers, through which the engine follows training."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from bagua.engine.announcer import Moment
from bagua.engine.buffers import broadcast_buffers
from bagua.engine.engine import Engine
from bagua.engine.failures import Failures
from bagua.engine.module_structure import Structure
from bagua.engine.optimizer_steps import OptimizerSteps
from bagua.engine.plain_passes import is_plain_pass
from bagua.engine.reducer.hook_order import HookOrder
from bagua.engine.reducer.reducer import Reducer
from bagua.engine.torch_wrappers import refuse_ddp


class StepsOf:
    """Where the hooks of optimizers find the engine: it can be replaced while such a hook runs.

    Attributes:
        ref: to what receives the steps.
    """

    def __init__(self, steps: OptimizerSteps) -> None:
        self.ref = weakref.ref(steps)


class Attachment:
    """An engine and the handles of all its hooks.

    Attributes:
        count: of all that were made in this process.
        trained: ids of the parameters that the engine trains.
        stepped: those of them that the optimizers given to `distribute` hold, or all if none was given.
        step_hooks: by number of the optimizer.
        steps: whom these hooks call.
        replaced: optimizers in whose place others step now.
        before_step: called before a forward pass in training mode; it may put another attachment in place of this one.
        average: called in place of `Replicas.average`; it may, too.
        work_together: see `bagua.engine.recovery.together`; it may, too. None: no rank may be lost.
    """

    count: ClassVar[int] = 0

    def __init__(self, module: nn.Module, engine: Engine, process_group: Any) -> None:
        self.engine = engine
        self.process_group = process_group
        self.structure = Structure(module, engine.inventory)
        self.handles: list[Any] = []
        self.step_hooks: dict[int, list[Any]] = {}
        self.steps = StepsOf(engine.optimizer_steps)
        self.replaced: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.trained = {id(param) for param in engine.inventory.parameters.values()}
        held = {id(param) for each in engine.optimizers for group in each.param_groups for param in group["params"]}
        self.stepped = (held & self.trained) or self.trained
        self.before_step: Callable[[nn.Module], None] | None = None
        self.average: Callable[[nn.Module], None] | None = None
        self.work_together: Callable[..., Any] | None = None
        Attachment.count += 1
        self.leaves = WeakIdKeyDictionary()  # hooks of outputs that live on

    def remove_hooks(self) -> None:
        for handle in [*self.handles, *chain(*self.step_hooks.values()), *self.leaves.values()]:
            handle.remove()
        self.handles.clear()
        self.step_hooks.clear()
        self.leaves.clear()


# A module's hooks are plain functions that look the engine up here, so that the module can be copied and pickled
# (the copy is a plain module) and is collected when dropped.
class _Attachments(weakref.WeakKeyDictionary[nn.Module, Attachment]):
    def __init__(self) -> None:
        super().__init__()
        # By a part of them, which is in several where they share it.
        self.roots_of: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()

    def __getitem__(self, module: nn.Module) -> Attachment:
        try:
            return super().__getitem__(module)
        except KeyError:
            return super().__getitem__(_within(module))

    def __contains__(self, module: object) -> bool:
        return super().__contains__(module) or super().__contains__(_within(module))

    def __delitem__(self, module: nn.Module) -> None:
        super().__delitem__(module if super().__contains__(module) else _within(module))

    def get(self, key: nn.Module, default: Any = None) -> Any:
        """As of a dictionary."""
        found = super().get(key)
        return super().get(_within(key), default) if found is None else found

    def is_root(self, module: nn.Module) -> bool:
        """Whether `module` itself was distributed, not the module that `torch.compile` has wrapped in it."""
        return super().__contains__(module)

    def all(self) -> list[Attachment]:
        """A list made at once: other threads may distribute modules meanwhile."""
        return list(vars(self)["data"].values())

    def pairs(self) -> list[tuple[nn.Module, Attachment]]:
        """The modules too, as `all`."""
        found = [(reference(), attachment) for reference, attachment in list(vars(self)["data"].items())]
        return [(module, attachment) for module, attachment in found if module is not None]


def _within(module: Any) -> nn.Module:
    """What `torch.compile` has wrapped; else the module itself."""
    inner = vars(module).get("_modules", {}).get("_orig_mod") if hasattr(module, "__dict__") else None
    return inner if isinstance(inner, nn.Module) else module


attachments = _Attachments()


def attach(
    module: nn.Module,
    engine: Engine,
    optimizers: Sequence[torch.optim.Optimizer],
    process_group: Any,
    instead_of: Attachment | None = None,
) -> Attachment:
    """Install all hooks.

    Args:
        instead_of: its hooks are removed, but those of the optimizers, which may be running: they call `engine` now.
            The engine follows the same optimizers.
    """
    attachment = Attachment(module, engine, process_group)
    if module in attachments:
        engine.tracker.listeners = attachments[module].engine.tracker.listeners
    if instead_of is not None:
        attachment.step_hooks, instead_of.step_hooks = instead_of.step_hooks, {}
        attachment.steps = instead_of.steps
        attachment.steps.ref = weakref.ref(engine.optimizer_steps)
        attachment.replaced = instead_of.replaced
        engine.tracker.thread = instead_of.engine.tracker.thread
        instead_of.remove_hooks()
    attachment.handles.append(module.register_forward_pre_hook(_before_forward))
    attachment.handles.append(module.register_forward_hook(_after_forward))
    for part in module.modules():
        attachments.roots_of.setdefault(part, weakref.WeakSet()).add(module)
        attachment.handles.append(part.register_load_state_dict_pre_hook(_weights_are_loaded))
    engine.reducer.ask(_sync_asked(weakref.ref(module), weakref.ref(engine.failures)))
    reducer = weakref.ref(engine.reducer)
    gradient_hooks = [
        param.register_post_accumulate_grad_hook(_gradient_hook(reducer, index))
        for index, param in enumerate(engine.inventory.trainable.values())
    ]
    attachment.handles += gradient_hooks
    engine.reducer.keep_last(HookOrder(gradient_hooks))
    for param in engine.inventory.sparse.values():
        attachment.handles.append(param.register_post_accumulate_grad_hook(_sparse_hook(reducer)))
    if instead_of is None:
        for number, optimizer in enumerate(optimizers):
            hook_optimizer(attachment, number, optimizer)
    return attachment


def hook_optimizer(attachment: Attachment, number: int, optimizer: torch.optim.Optimizer) -> None:
    """Install hooks that report the steps of `optimizer` to the engine.

    Where a step is compiled, the compiler does not trace them. It has been imported when the optimizer was made.
    """
    before, after = map(_untraced, _step_hooks(attachment.steps, number))
    attachment.step_hooks[number] = [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(after),
    ]


def _untraced(hook: Any) -> Any:
    return torch.compiler.disable(hook, reason="Bagua exchanges gradients or weights there")


def _before_forward(module: nn.Module, _args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    attachment = attachments.get(module)
    if attachment is not None:
        trains = module.training and is_plain_pass()
        if trains and not attachment.engine.tracker.is_of_training(gradients=torch.is_grad_enabled()):
            return
        if attachment.before_step is not None and trains:
            attachment.before_step(module)
            attachment = attachments[module]
        engine = attachment.engine
        engine.tracker.hooks_ran = True
        if trains:
            refuse_ddp(module)
            attachment.structure.check(module)
            engine.tracker.forward_begins(gradients=torch.is_grad_enabled())
            if engine.tracker.is_to_broadcast_buffers():
                broadcast_buffers(module, engine, engine.tracker.announce(Moment.BUFFERS))


def _weights_are_loaded(part: nn.Module, *_: Any) -> None:
    for root in list(attachments.roots_of.get(part, ())):
        attachment = attachments.get(root)
        if attachment is not None:
            attachment.engine.weights_are_loaded()


def _after_forward(module: nn.Module, _args: Any, output: Any) -> None:
    """Detect a backward pass when it enters the module, before the first gradient is ready.

    On a rank that uses no parameter in this step no gradient ever comes; and in a reentrant checkpoint the first
    one comes within an inner pass, whose end is not the end.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    attachment = attachments.get(module)
    if attachment is not None and module.training:
        ref, leaves = weakref.ref(attachment.engine.reducer), attachment.leaves
        for tensor in _tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(_entry_hook(ref))
            elif tensor.requires_grad and tensor not in leaves:  # it may come again: a parameter, or an input
                leaves[tensor] = tensor.register_hook(_entry_hook(ref))


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


def _sync_asked(ref: weakref.ref[nn.Module], failures: weakref.ref[Failures]) -> Any:
    """Reads `require_backward_grad_sync`, which loops written for `DistributedDataParallel` set on the module.

    A step that is lost is not synchronised either.
    """

    def asked() -> bool:
        module, known = ref(), failures()
        if known is not None and known.step_is_lost:
            return False
        # what torch.compile() returns keeps attributes in the module it wraps: getattr finds them
        return module is None or bool(getattr(module, "require_backward_grad_sync", True))

    return asked


def _entry_hook(ref: weakref.ref[Reducer]) -> Any:
    def backward_enters(_grad: torch.Tensor) -> None:
        reducer = ref()
        if reducer is not None:
            reducer.enter()

    return backward_enters


def _sparse_hook(ref: weakref.ref[Reducer]) -> Any:
    def sparse_ready(_param: torch.Tensor) -> None:
        reducer = ref()
        if reducer is not None:
            reducer.sparse_ready()

    return sparse_ready


def _gradient_hook(ref: weakref.ref[Reducer], index: int) -> Any:
    def gradient_ready(_param: torch.Tensor) -> None:
        reducer = ref()
        if reducer is not None:
            reducer.gradient_ready(index)

    return gradient_ready


def _step_hooks(to: StepsOf, number: int) -> tuple[Any, Any]:
    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        steps = to.ref()
        return None if steps is None else steps.begins(number, optimizer, args, kwargs)

    def after(*_: Any) -> None:
        steps = to.ref()
        if steps is not None:
            steps.ends(number)

    return before, after
