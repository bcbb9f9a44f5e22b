"""Codecs by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Codec
from .half import Bf16, Fp16
from .identity import Identity
from .int4 import Int4
from .minmax_uint8 import MinMaxUInt8
from .sign import Sign
from .top_k import TopK

_factories: dict[str, Callable[..., Codec]] = {}


def register(name: str, factory: Callable[..., Codec]) -> None:
    """Makes ``get(name, **options)`` call ``factory(**options)``.

    Raises:
        ValueError: the name is empty or taken by another factory.
    """
    if not name or not isinstance(name, str):
        raise ValueError(f"name must be a non-empty string, got {name!r}")
    if _factories.get(name, factory) is not factory:
        raise ValueError(f"codec name {name!r} is taken by {_factories[name]!r}")
    _factories[name] = factory


def get(name_or_instance: str | Codec, **options: Any) -> Codec:
    """A codec by its name, or the instance itself.

    Args:
        name_or_instance: a name of `available()` or a codec.
        **options: passed on to the codec's constructor; only with a name.

    Raises:
        ValueError: the name is unknown, the codec refuses the options, or options came with an instance.
    """
    if isinstance(name_or_instance, Codec):
        if options:
            raise ValueError(f"options {sorted(options)} need a name, got the codec {name_or_instance!r}")
        return name_or_instance
    factory = _factories.get(name_or_instance) if isinstance(name_or_instance, str) else None
    if factory is None:
        raise ValueError(f"unknown codec {name_or_instance!r}; known: {', '.join(available())}")
    try:
        return factory(**options)
    except TypeError as error:
        raise ValueError(f"codec {name_or_instance!r}: {error}") from error


def available() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_factories))


for _codec in (Identity, Bf16, Fp16, MinMaxUInt8, Int4, Sign, TopK):
    register(_codec.name, _codec)
