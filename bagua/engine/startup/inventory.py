"""The inventory of a module: its tensors, and whether it can be trained data-parallel."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Payload
from bagua.engine.reducer.bucket import raise_moved
from bagua.engine.reducer.sparse import sparse_names
from bagua.engine.startup.rank_local import rank_local_names
from bagua.engine.startup.sparse_buffers import KIND, content_of, is_sparse

__all__ = ["Inventory", "as_optimizers", "ignored_names", "take_inventory"]

_WRAPPERS = 8  # around an optimizer, one in another
_HOLDS = ("optimizer", "opt", "_optimizer", "base_optimizer")  # where wrappers keep it
_requires_grad = operator.attrgetter("requires_grad")


@dataclass(frozen=True)
class Inventory:
    """The tensors of a module, each once (tied ones under their first name), in registration order.

    Attributes:
        trainable: parameters that require a gradient and lie in buckets.
        sparse: those whose gradients are sparse, where gradients are exchanged.
        frozen: parameters that do not.
        buffers: buffers, persistent or not; those that are strided.
        device: the one device of all parameters.
        dtypes: of the trainable ones.
        ignored: names of parameters and buffers that each rank keeps for itself; they are in none of the others.
        sparse_buffers: shape and content of the sparse ones, which are compared and stay each rank's own.
        trains_its_own: whether there is a trainable one among those that are marked, see `mark_rank_local`.
    """

    trainable: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    sparse: dict[str, nn.Parameter]
    ignored: frozenset[str] = frozenset()
    trains_its_own: bool = False
    sparse_buffers: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def trainable_bytes(self) -> int:
        """Of all that lie in buckets."""
        return sum(param.nbytes for param in self.trainable.values())

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All that require a gradient."""
        return {**self.trainable, **self.sparse}

    def check_frozen(self) -> None:
        """Check that no parameter that was frozen at `distribute` requires a gradient now.

        Raises:
            RuntimeError: one was frozen and no longer is.
        """
        if not any(map(_requires_grad, self.frozen.values())):
            return
        for name, param in self.frozen.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen at bagua.distribute() and now requires a gradient; "
                    "call bagua.distribute() again after unfreezing, on all ranks"
                )

    def check_kinds(self) -> None:
        """See whether the parameters still are of the types that the ranks agreed on.

        Raises:
            RuntimeError: something like `module.to()` has changed that.
        """
        for (name, param), dtype in zip(self.trainable.items(), self.dtypes, strict=True):
            if param.dtype is not dtype or param.device != self.device:
                raise_moved(name)

    def signature(self) -> list[list[str]]:
        """Kind, name, shape and dtype of everything, to compare between ranks; of sparse buffers the content too."""
        kinds = (
            ("parameter", self.trainable),
            ("sparse parameter", self.sparse),
            ("frozen parameter", self.frozen),
            ("buffer", self.buffers),
        )
        rows = [
            [kind, name, _shape(tensor), str(tensor.dtype).removeprefix("torch.")]
            for kind, tensors in kinds
            for name, tensor in tensors.items()
        ]
        return rows + [[KIND, name, shape, content] for name, (shape, content) in self.sparse_buffers.items()]


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def as_optimizers(optimizers: object) -> tuple[torch.optim.Optimizer, ...]:
    """Return one or several optimizers as a tuple; of a wrapper without hooks of its own, the one that it wraps.

    Raises:
        TypeError: something in it is no `torch.optim.Optimizer`, or has no hooks and wraps none that has.
    """
    items = optimizers if isinstance(optimizers, Iterable) else (optimizers,)
    return tuple(_with_hooks(item, position) for position, item in enumerate(items))


def _with_hooks(item: object, position: int) -> torch.optim.Optimizer:
    """`item`, or the optimizer within it whose `step` runs hooks.

    A wrapper may inherit from `torch.optim.Optimizer` and never call its `__init__`, as Accelerate's does.
    """
    if not isinstance(item, torch.optim.Optimizer):
        held = (name for name in _HOLDS if isinstance(getattr(item, name, None), torch.optim.Optimizer))
        name = next(held, None)
        instead = f"; pass the wrapped optimizer, its .{name}" if name else ""
        raise TypeError(
            f"optimizers: expected a torch.optim.Optimizer or a list of them, got {type(item).__name__}{instead}"
        )
    inner: object = item
    for _ in range(_WRAPPERS):
        if not isinstance(inner, torch.optim.Optimizer):
            break
        if "_optimizer_step_pre_hooks" in vars(inner) and "_optimizer_step_post_hooks" in vars(inner):
            return inner
        inner = vars(inner).get("optimizer")
    raise TypeError(
        f"optimizers: number {position} ({type(item).__name__}) has no step hooks: it does not call "
        "torch.optim.Optimizer.__init__(); pass the optimizer that it wraps"
    )


def ignored_names(module: nn.Module) -> set[str]:
    """Names of parameters and buffers that each rank keeps for itself."""
    return {
        *getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
        *getattr(module, "_bagua_params_and_buffers_to_ignore", ()),
        *rank_local_names(module),
    }


def take_inventory(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], payload: Payload = Payload.GRAD
) -> Inventory:
    """List what `module` holds and refuse what cannot be distributed, by name.

    Names in `module._ddp_params_and_buffers_to_ignore` (torch's) or `_bagua_params_and_buffers_to_ignore` are left
    out, and so is what `mark_rank_local` or `param.expert = True` has marked. Weights are exchanged whole (`payload`),
    so that parameters with sparse gradients are like others there.

    Raises:
        TypeError: not a module.
        ValueError: no trainable parameter; a parameter on another device than the rest, of complex dtype, uninitialised
            or sparse; a parameter or buffer on the meta device, or whose elements share memory; an optimizer that holds
            no parameter of the module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    ignored = ignored_names(module)
    apart = sparse_names(module) if payload is Payload.GRAD else set()
    trainable: dict[str, nn.Parameter] = {}
    sparse: dict[str, nn.Parameter] = {}
    frozen: dict[str, nn.Parameter] = {}
    for name, param in module.named_parameters():
        if name not in ignored:
            _check_parameter(name, param)
            (frozen if not param.requires_grad else sparse if name in apart else trainable)[name] = param
    if not trainable and not sparse:
        raise ValueError(f"module: {type(module).__name__} has no parameter that requires a gradient")
    device = _one_device({**trainable, **sparse, **frozen})
    buffers: dict[str, Tensor] = {}
    sparse_buffers: dict[str, tuple[str, str]] = {}
    for name, buffer in module.named_buffers():
        if name not in ignored and is_sparse(buffer) and not buffer.is_meta:
            sparse_buffers[name] = _shape(buffer), content_of(buffer)
        elif name not in ignored:
            _check_buffer(name, buffer)
            buffers[name] = buffer
    _check_optimizers(optimizers, [*trainable.values(), *sparse.values(), *frozen.values()])
    dtypes = tuple(param.dtype for param in trainable.values())
    marked = rank_local_names(module)
    own = any(param.requires_grad for name, param in module.named_parameters() if name in marked)
    return Inventory(trainable, frozen, buffers, device, dtypes, sparse, frozenset(ignored), own, sparse_buffers)


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter {name!r} is not initialised; run a forward pass first (lazy module)")
    if param.is_meta:
        raise ValueError(f"parameter {name!r} is on the meta device; materialise the module first")
    if param.layout is not torch.strided:
        raise ValueError(f"parameter {name!r} has layout {param.layout}; only strided ones can be distributed")
    if param.requires_grad and param.is_complex():
        raise ValueError(f"parameter {name!r} is {param.dtype}; complex parameters are not supported")
    if type(param.data) is not Tensor:
        raise ValueError(
            f"parameter {name!r} is a {type(param.data).__name__}; tensor subclasses such as DTensor are not supported"
        )
    _check_expanded("parameter", name, param, "make it a copy, nn.Parameter(x.clone()), or expand it in forward()")


def _check_buffer(name: str, buffer: Tensor) -> None:
    if buffer.is_meta or buffer.layout is not torch.strided:
        raise ValueError(
            f"buffer {name!r} is {'on the meta device' if buffer.is_meta else buffer.layout}, so it cannot be "
            "broadcast; materialise it or make it dense first, or leave it to each rank: put its name into "
            "module._bagua_params_and_buffers_to_ignore"
        )
    _check_expanded("buffer", name, buffer, "register a copy, buffer.clone()")


def _check_expanded(kind: str, name: str, tensor: Tensor, instead: str) -> None:
    """Refuse a tensor into which nothing can be copied, as several of its elements share memory."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(
            f"{kind} {name!r} is an expanded view, in which several elements share memory, so rank 0's cannot be "
            f"written into it; {instead}"
        )


def _one_device(params: dict[str, nn.Parameter]) -> torch.device:
    first_name, first = next(iter(params.items()))
    for name, param in params.items():
        if param.device != first.device:
            raise ValueError(
                f"parameter {name!r} is on {param.device} but {first_name!r} on {first.device}; "
                "all parameters must be on one device"
            )
    if first.device.type not in ("cpu", "cuda"):
        raise ValueError(f"parameter {first_name!r} is on {first.device}; only cpu and cuda are supported")
    return first.device


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer], params: Sequence[nn.Parameter]) -> None:
    ours = {id(param) for param in params}
    for position, optimizer in enumerate(optimizers):
        if not any(id(param) in ours for group in optimizer.param_groups for param in group["params"]):
            raise ValueError(
                f"optimizers: number {position} ({type(optimizer).__name__}) holds no parameter of the module"
            )
