"""The structure of an optimizer's state as plain data, without the content of its tensors, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["adopt", "build", "contained", "describe", "leaves", "skeleton", "slots", "subclasses"]

_FLATTEN = "__tensor_flatten__"  # torch's protocol of tensor subclasses that are made of tensors


def slots(optimizer: torch.optim.Optimizer, ours: set[int]) -> Iterator[nn.Parameter]:
    """The optimizer's parameters whose `id` is in `ours`, in its order."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) in ours:
                yield param


def describe(number: int, optimizer: torch.optim.Optimizer, ours: set[int]) -> dict[str, Any]:
    """Outlines of the groups' options, and of the state of the parameters in `ours`.

    Args:
        number: of the optimizer, for messages.

    Raises:
        ValueError: something is neither a tensor nor plain data.
    """
    where = f"optimizers: number {number} ({type(optimizer).__name__})"
    groups = [
        {key: _outline(value, f"{where}, option {key!r}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state = [
        {str(key): _outline(value, f"{where}, state {key!r}") for key, value in optimizer.state.get(param, {}).items()}
        for param in slots(optimizer, ours)
    ]
    return {"groups": groups, "state": state}


def adopt(optimizer: torch.optim.Optimizer, described: dict[str, Any], ours: set[int]) -> None:
    """Give `optimizer` the structure and the plain data of `described`; tensors it lacked have no content yet."""
    for group, outline in zip(optimizer.param_groups, described["groups"], strict=True):
        anchor = group["params"][0] if group["params"] else None
        for key, value in outline.items():
            group[key] = build(value, group.get(key), anchor)
    for param, outline in zip(slots(optimizer, ours), described["state"], strict=True):
        if outline:
            old = optimizer.state.get(param, {})
            optimizer.state[param] = {key: build(value, old.get(key), param) for key, value in outline.items()}
        else:
            optimizer.state.pop(param, None)


def leaves(value: Any) -> list[Tensor]:
    """The tensors in a piece of state, in an order that its outline determines; of a subclass those it is made of."""
    if isinstance(value, Tensor):
        return [leaf for _, part in _parts(value) for leaf in leaves(part)] if _is_made_of_tensors(value) else [value]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    return []


def skeleton(outline: Any) -> Any:
    """`outline` without its plain data: equal for pieces of state whose tensors correspond."""
    if not isinstance(outline, dict):
        return None
    ((kind, content),) = outline.items()
    if kind in ("tensor", "subclass"):
        return outline
    if kind == "dict":
        return {kind: {key: skeleton(item) for key, item in content.items()}}
    return {kind: [skeleton(item) for item in content]}


def contained(outline: Any, wanted: str) -> Iterator[Any]:
    """The outlines of kind `wanted` ("tensor" or "subclass") within `outline`."""
    if isinstance(outline, dict):
        ((kind, content),) = outline.items()
        if kind == wanted:
            yield outline
        elif kind not in ("tensor", "subclass"):
            for item in content.values() if kind == "dict" else content:
                yield from contained(item, wanted)


def subclasses(optimizers: Sequence[torch.optim.Optimizer], params: Iterable[nn.Parameter]) -> list[Any]:
    """Places and outlines of the tensor subclasses in the options and the state of `params`.

    Raises:
        ValueError: something is neither a tensor nor plain data.
    """
    ours = {id(param) for param in params}
    described = [describe(number, optimizer, ours) for number, optimizer in enumerate(optimizers)]
    return [
        [number, place, key, found]
        for number, each in enumerate(described)
        for place, slot in enumerate([*each["groups"], *each["state"]])
        for key, value in slot.items()
        for found in contained(value, "subclass")
    ]


def _is_made_of_tensors(value: Tensor) -> bool:
    return type(value) not in (Tensor, nn.Parameter) and hasattr(value, _FLATTEN)


def _parts(value: Tensor) -> list[tuple[str, Tensor]]:
    names, _ = getattr(value, _FLATTEN)()
    return [(name, getattr(value, name)) for name in names]


def _outline(value: Any, where: str) -> Any:
    """Plain data as JSON, in which containers and tensors are tagged."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return _outline_of_tensor(value, where)
    if isinstance(value, list | tuple):
        return {type(value).__name__ if type(value) in (list, tuple) else "tuple": [_outline(v, where) for v in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _outline(item, where) for key, item in value.items()}}
    raise ValueError(f"{where}: a {type(value).__name__} cannot be broadcast to the other ranks")


def _outline_of_tensor(value: Tensor, where: str) -> Any:
    kind = [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type]
    if _is_made_of_tensors(value):
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        return {"subclass": [name, *kind, [[part, _outline(inner, where)] for part, inner in _parts(value)]]}
    if type(value) not in (Tensor, nn.Parameter):
        try:
            stored = not value.numel() or value.data_ptr() != 0  # then it is a tensor like others
        except (RuntimeError, NotImplementedError):
            stored = False
        if not stored:
            raise ValueError(
                f"{where}: a {type(value).__name__} cannot be broadcast to the other ranks: it has neither storage nor "
                f"{_FLATTEN}()"
            )
    return {"tensor": kind}


def build(outline: Any, old: Any, anchor: Tensor | None) -> Any:
    """The value that `outline` describes; keeps `old`'s memory where it fits. Tensors still lack their content.

    Raises:
        ValueError: a tensor subclass, which only a rank that has it already can take over.
    """
    if not isinstance(outline, dict):
        return outline
    ((kind, content),) = outline.items()
    if kind == "subclass":
        if isinstance(old, Tensor) and _outline(old, "") == outline:
            return old
        raise ValueError(f"optimizers: a {content[0]} in the state cannot be constructed on a rank that lacks it")
    if kind == "tensor":
        dtype, shape, device_type = content
        dtype = getattr(torch, dtype)
        fits = isinstance(old, Tensor) and old.dtype == dtype and list(old.shape) == shape
        if fits and not _is_made_of_tensors(old):
            return old
        device = anchor.device if anchor is not None and device_type != "cpu" else torch.device("cpu")
        if anchor is not None and list(anchor.shape) == shape:
            return torch.empty_like(anchor, dtype=dtype, device=device, memory_format=torch.preserve_format).detach()
        return torch.empty(shape, dtype=dtype, device=device)
    if kind == "dict":
        previous = old if isinstance(old, dict) else {}
        return {key: build(item, previous.get(key), anchor) for key, item in content.items()}
    previous = old if isinstance(old, list | tuple) and len(old) == len(content) else [None] * len(content)
    items = [build(item, was, anchor) for item, was in zip(content, previous, strict=True)]
    return tuple(items) if kind == "tuple" else items
