"""Serialisation of named tuples, enum members, dates and similar values as plain data.

Bytes from the network never run code: a class is looked for among the modules that this process has imported already,
is not called, and must be what the sender said that it is.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

__all__ = ["describe", "rebuild"]

_NAMESPACES = {argparse.Namespace: "argparse", types.SimpleNamespace: "simple"}
_ISO: dict[type, str] = {datetime.date: "date", datetime.time: "time", datetime.datetime: "datetime"}
_FROM_ISO: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
}


def describe(value: Any, outline: Callable[[Any, str], Any], where: str) -> Any:
    """The outline of `value`; None if it is nothing that this module knows.

    Args:
        value: anything.
        outline: makes the outline of a part, with a place for messages.
        where: the place of `value`.
    """
    kind = type(value)
    if kind in _NAMESPACES:
        return {"namespace": [_NAMESPACES[kind], [[k, outline(v, f"{where}.{k}")] for k, v in vars(value).items()]]}
    if kind in _ISO and isinstance(getattr(value, "tzinfo", None), datetime.timezone | None):
        return {_ISO[kind]: value.isoformat()}
    if kind is datetime.timedelta:
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": [value.type, value.index]}
    name = [kind.__module__, kind.__qualname__]
    if _find(*name) is not kind:
        return None  # made in a function, for one
    if isinstance(value, Enum):
        member = value.name if value.name in kind.__members__ else None  # a combination of flags has no member
        return None if member is None else {"enum": [*name, member]}
    if _is_named_tuple(kind):
        parts = [outline(part, f"{where}.{field}") for field, part in zip(kind._fields, value, strict=True)]
        return {"namedtuple": [*name, list(kind._fields), parts]}
    return None


def rebuild(kind: str, content: Any, build: Callable[[Any], Any]) -> Any:
    """The inverse of `describe`.

    Args:
        kind: the key of the outline.
        content: its value.
        build: makes a part from its outline.

    Raises:
        KeyError: no such kind.
        ValueError: this process has no such class, or another one of that name.
    """
    if kind in _FROM_ISO:
        return _FROM_ISO[kind](content)
    if kind == "timedelta":
        return datetime.timedelta(*content)
    if kind == "dtype":
        dtype = vars(torch).get(content)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"damaged message: {content!r} is not a dtype")
        return dtype
    if kind == "device":
        return torch.device(content[0]) if content[1] is None else torch.device(*content)
    if kind == "namespace":
        made = argparse.Namespace() if content[0] == "argparse" else types.SimpleNamespace()
        vars(made).update({str(key): build(part) for key, part in content[1]})
        return made
    if kind == "enum":
        module, name, member = content
        found = _find(module, name)
        if not isinstance(found, type) or not issubclass(found, Enum) or member not in found.__members__:
            raise ValueError(f"{module}.{name}.{member}: this process has no such enum member")
        return found.__members__[member]
    if kind == "namedtuple":
        module, name, fields, parts = content
        found = _find(module, name)
        if not isinstance(found, type) or not _is_named_tuple(found) or list(vars(found)["_fields"]) != fields:
            raise ValueError(f"{module}.{name}: this process has no named tuple of that name with fields {fields}")
        if len(parts) != len(fields):
            raise ValueError("damaged message: a named tuple of another length")
        return tuple.__new__(found, [build(part) for part in parts])
    raise KeyError(kind)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and kind.__bases__ == (tuple,) and "_fields" in vars(kind)


def _find(module: str, name: str) -> Any:
    """What a module that is imported already has by that name; nothing is imported and no attribute is computed."""
    found: Any = sys.modules.get(module)
    for word in name.split("."):
        if not isinstance(found, types.ModuleType | type):
            return None
        found = vars(found).get(word)
    return found
