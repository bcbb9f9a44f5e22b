"""The registry of codecs."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, overload

from bagua.codecs.base import Codec
from bagua.codecs.eden import Eden
from bagua.codecs.half import Bf16, Fp16
from bagua.codecs.identity import Identity
from bagua.codecs.int4 import Int4
from bagua.codecs.minmax_uint8 import MinMaxUInt8
from bagua.codecs.packed_top_k import PackedTopK
from bagua.codecs.sign import Sign
from bagua.codecs.top_k import TopK
from bagua.registry import Registry

__all__ = ["available", "get", "register", "registry"]

# What others call them.
_CALLED = {
    **dict.fromkeys(("fp8", "float8", "int8", "8bit", "8bits", "minmax"), "'minmax_uint8'"),
    **dict.fromkeys(("fp32", "float32", "none", "exact"), "'identity'"),
    **dict.fromkeys(("1bit", "1bits", "onebit"), "'eden:bits=1'"),
    **dict.fromkeys(("2bit", "2bits"), "'eden:bits=2'"),
    **dict.fromkeys(("uint4", "fp4", "4bit", "4bits"), "'int4'"),
    **dict.fromkeys(("float16", "half"), "'fp16'"),
    **dict.fromkeys(("bfloat16",), "'bf16'"),
    **dict.fromkeys(("topk", "top-k"), "'top_k'"),
}
_SHORT = {"uint8": "minmax_uint8"}

registry: Registry[Codec] = Registry("codec", Codec, _CALLED)
_factories: dict[str, Callable[..., Codec]] = {}  # registered in the deprecated form
_C = TypeVar("_C", bound=type[Codec])


def _option(codec: str, word: str) -> tuple[str, Any]:
    option, equals, value = word.partition("=")
    if not equals or not option.isidentifier():
        raise ValueError(f"codec {codec!r}: expected OPTION=VALUE after a colon, got {word!r}")
    try:
        return option, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise ValueError(f"codec {codec!r}: the value of {option} is no number, True or False: {value!r}") from None


@overload
def register(codec: _C, /) -> _C: ...
@overload
def register(name: str, factory: Callable[..., Codec], /) -> None: ...
def register(codec: _C | str, factory: Callable[..., Codec] | None = None, /) -> _C | None:
    """Make `codec`, a subclass of `Codec`, known under its `name`; usable as a decorator.

    Deprecated: `register(name, factory)` makes `get(name, **options)` call `factory(**options)`.

    Returns:
        The class.

    Raises:
        TypeError: not a subclass of `Codec`.
        ValueError: it has no name, or the name is taken by another class.

    Examples:
        >>> from dataclasses import dataclass
        >>> @bagua.codecs.register
        ... @dataclass(frozen=True)
        ... class Fine(bagua.codecs.MinMaxUInt8):
        ...     name = "fine"
        ...     block: int = 64
        >>> bagua.codecs.get("fine")
        Fine(block=64)
    """
    if not isinstance(codec, str):
        return registry.register(codec)
    warnings.warn("codecs.register(name, factory): register a class with a `name` instead", FutureWarning, 2)
    if factory is None or not codec:
        raise ValueError(f"register: expected a non-empty name and a factory, got {codec!r} and {factory!r}")
    if codec in registry or _factories.get(codec, factory) is not factory:
        raise ValueError(f"codec {codec!r} is already registered")
    _factories[codec] = factory
    return None


def get(codec: str | Codec, /, **options: Any) -> Codec:
    """Return the codec of that name with `options`, or `codec` itself.

    Args:
        codec: a codec, a name ("uint8" for short), or a name with options as `"NAME:OPTION=VALUE"`, with a colon
            between options.
        **options: of the named codec.

    Raises:
        TypeError: neither a name nor a codec.
        ValueError: the name or an option is unknown, an option has a wrong value or none, or options were given
            beside an instance, or twice.

    Examples:
        >>> bagua.codecs.get("minmax_uint8", block=256)
        MinMaxUInt8(block=256)
        >>> bagua.codecs.get("eden:bits=2")
        Eden(block=256, bits=2)
    """
    if isinstance(codec, str) and ":" in codec:
        codec, *words = codec.split(":")
        for word in words:
            option, value = _option(codec, word)
            if option in options:
                raise ValueError(
                    f"codec {codec!r}: option {option!r} is given twice, as {value!r} and {options[option]!r}"
                )
            options[option] = value
    if isinstance(codec, str) and codec in _factories:
        return _factories[codec](**options)
    if isinstance(codec, str) and codec not in registry:
        codec = _SHORT.get(codec, codec)
    return registry.get(codec, **options)


def available(*, builtin_only: bool = False) -> tuple[str, ...]:
    """Return the registered names, sorted.

    Args:
        builtin_only: leave out what other packages and `bagua.contrib` have registered.

    Examples:
        >>> bagua.codecs.available(builtin_only=True)
        ('bf16', 'eden', 'fp16', 'identity', 'int4', 'minmax_uint8', 'packed_top_k', 'sign', 'top_k')
    """
    return tuple(sorted(registry.builtin() if builtin_only else [*registry, *_factories]))


for _codec in (Identity, Bf16, Fp16, MinMaxUInt8, Int4, Sign, Eden, TopK, PackedTopK):
    registry.register(_codec)
