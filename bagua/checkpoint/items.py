"""Checkpoint items: conversion of objects to plain data, and back.

A part ("item") of a distributed module is its `state_dict`, another one the state of its algorithm.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bagua.checkpoint.subclasses import is_subclass, on_cpu
from bagua.engine.hooks import attachments

__all__ = ["ALGORITHM", "RNG", "Item", "algorithm_item", "check_objects", "collect", "is_stateful", "kind_of"]

ALGORITHM = ".bagua"  # added to a module's name: its algorithm's own state
RNG = "torch.rng"
_NAME = re.compile(r"[A-Za-z_]\w{0,99}")


@dataclass(frozen=True)
class Item:
    """One part of a checkpoint, as this rank has it.

    Attributes:
        kind: "module", "algorithm", "optimizer", "stateful", "data" or "rng".
        value: plain data and tensors on the CPU.
    """

    kind: str
    value: Any


def algorithm_item(name: str) -> str:
    """The item that holds the algorithm's state of the module `name`."""
    return name + ALGORITHM


def is_stateful(value: object) -> bool:
    """Whether `value` has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def kind_of(value: object) -> str:
    """The kind of the item that is made of `value`."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    return "stateful" if is_stateful(value) else "data"


def check_objects(objects: object) -> Mapping[str, Any]:
    """Return `objects` if they are named as they must be.

    Raises:
        TypeError: no mapping.
        ValueError: a name is not an identifier.
    """
    if not isinstance(objects, Mapping):
        raise TypeError(f"objects: expected a dict of names and objects, got {type(objects).__name__}")
    for name in objects:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"objects: {name!r} is not a valid name; use letters, digits and underscores")
    return objects


def collect(objects: Mapping[str, Any], *, rng: bool = True) -> dict[str, Item]:
    """Return the items of `objects`, and with `rng` this process's random state.

    Raises:
        CheckpointError: something in them is a tensor subclass that cannot be saved, such as DTensor.
        CommunicationError: an exchange that was in progress has failed.
    """
    items: dict[str, Item] = {}
    for name, value in objects.items():
        kind = kind_of(value)
        items[name] = Item(kind, _plain(value if kind == "data" else value.state_dict(), name))
        if isinstance(value, nn.Module) and value in attachments:
            state = attachments[value].engine.state_dict()
            items[algorithm_item(name)] = Item("algorithm", _plain(state, algorithm_item(name)))
    if rng:
        items[RNG] = Item("rng", random_state())
    return items


def random_state() -> dict[str, Tensor]:
    """State of torch's generators: the CPU's, and that of the current GPU if CUDA is in use."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _plain(value: Any, where: str) -> Any:
    """`value` with its tensors on the CPU, so that ranks on different GPUs hold the same bytes; copies what it must."""
    if isinstance(value, Tensor):
        return on_cpu(value, where) if is_subclass(value) else value.detach().cpu()
    if isinstance(value, dict):
        new = {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
        if type(value) is dict:
            return new
        copied = copy.copy(value)  # keeps what torch hangs on an OrderedDict
        for key, item in new.items():
            copied[key] = item
        return copied
    if isinstance(value, list):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return tuple(_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of plain data."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
