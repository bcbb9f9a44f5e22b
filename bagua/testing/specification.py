"""What algorithms and codecs have in common: frozen dataclasses that are compared, printed and made by name."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from bagua.registry import Registry
from bagua.testing.checks import require

__all__ = ["check_is_a_value", "check_options"]


class _Nonsense:
    """No option has this as a value."""

    def __repr__(self) -> str:
        return "<nonsense>"


def check_is_a_value(instance: Any) -> None:
    """Equal options make equal objects, with equal hashes and texts; nothing can be assigned; no tensor inside."""
    cls = type(instance)
    require(is_dataclass(cls), f"{cls.__qualname__} is not a dataclass; decorate it with @dataclass(frozen=True)")
    options = {field.name: getattr(instance, field.name) for field in fields(instance)}
    tensors = [name for name, value in options.items() if isinstance(value, Tensor)]
    require(not tensors, f"fields {tensors} hold tensors; a specification holds options only")
    for other in (replace(instance), copy.deepcopy(instance)):
        require(other == instance, f"a copy, {other!r}, is not equal to {instance!r}")
        require(hash(other) == hash(instance), f"a copy of {instance!r} has another hash")
        require(repr(other) == repr(instance), f"a copy of {instance!r} prints as {other!r}")
    require(cls.__name__ in repr(instance), f"repr does not name the class: {instance!r}")
    try:
        setattr(instance, next(iter(options), "anything"), _Nonsense())
    except FrozenInstanceError:
        return
    raise AssertionError(f"{cls.__qualname__} can be changed; decorate it with @dataclass(frozen=True)")


def check_options(noun: str, base: type, cls: type) -> None:
    """A name makes it; unknown options and values that cannot be are refused by the name of the option."""
    registry: Registry[Any] = Registry(noun, base)
    registry.register(cls)
    name = cls.name  # pyright: ignore[reportAttributeAccessIssue]
    require(registry.get(name) == cls(), f"{cls.__qualname__}() must work without arguments, and be a default")
    for option in ("no_such_option", *(field.name for field in fields(cls) if field.init)):
        try:
            registry.get(name, **{option: _Nonsense()})
        except (TypeError, ValueError) as error:
            require(option in str(error), f"the error about option {option!r} does not name it: {error}")
        else:
            raise AssertionError(
                f"option {option!r} takes {_Nonsense()!r}; refuse wrong values in __post_init__ with a ValueError"
            )
