"""Which codec a backend has, as a name that `torch.distributed` takes."""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields
from numbers import Integral
from typing import Any

import torch.distributed as dist

from bagua import codecs, registration
from bagua.codecs import Codec

__all__ = ["MIN_BYTES", "Backend"]

MIN_BYTES = 64 * 1024
_SHORT = {"uint8": "minmax_uint8"}
_PREFIX = "bagua"


class Backend(str):
    """A backend with options: a string to pass wherever `torch.distributed` takes the name of a backend.

    Making one registers its name, so make the same one on every rank. Names without options, such as `"bagua:int4"`,
    are registered by `import bagua`.

    Args:
        codec: a registered name, "uint8" for short, or an instance.
        min_bytes: size of the smallest tensor that is compressed, in bytes. Smaller ones stay exact.
        **options: of the named codec.

    Attributes:
        codec: the codec.
        min_bytes: as given.

    Raises:
        ValueError: a name or an option is unknown, or has a wrong value.
        TypeError: the codec is neither a name nor a codec.

    Examples:
        >>> backend = bagua.Backend("int4", min_bytes=1_000_000, block=256)
        >>> str(backend)
        'bagua:int4:block=256:min_bytes=1000000'
        >>> from datetime import timedelta
        >>> group = torch.distributed.new_group(backend=backend, timeout=timedelta(minutes=5))
    """

    codec: Codec
    min_bytes: int

    def __new__(cls, codec: str | Codec = "uint8", *, min_bytes: int = MIN_BYTES, **options: Any) -> Backend:
        if isinstance(codec, str):
            codec = codecs.get(codec, **options)
        elif options:
            raise ValueError(f"Backend: options {', '.join(options)} go into {codec!r}, not beside it")
        elif not isinstance(codec, Codec):
            raise TypeError(f"codec: expected a name or a Codec, got {type(codec).__name__}")
        if not isinstance(min_bytes, Integral) or isinstance(min_bytes, bool) or min_bytes < 0:
            raise ValueError(f"min_bytes: expected a number of bytes, 0 or more, got {min_bytes!r}")
        made = super().__new__(cls, _name(codec, int(min_bytes)))
        made.codec, made.min_bytes = codec, int(min_bytes)
        _register(made)
        return made

    @classmethod
    def parse(cls, name: str) -> Backend:
        """Make the backend of a name with options, from a command line say.

        Args:
            name: "bagua", "bagua:CODEC" or "bagua:CODEC:OPTION=VALUE:...", where options are those of the codec and
                `min_bytes`. The first colon may be an underscore.

        Raises:
            ValueError: it is no such name, or what it names is unknown.

        Examples:
            >>> bagua.Backend.parse("bagua:int4:min_bytes=4096").min_bytes
            4096
        """
        if isinstance(name, cls):
            return name
        head, *words = name.split(":")
        if head.startswith(f"{_PREFIX}_"):
            words, head = [head.removeprefix(f"{_PREFIX}_"), *words], _PREFIX
        if head != _PREFIX or "" in words:
            raise ValueError(f"backend: expected bagua, bagua:CODEC or bagua:CODEC:OPTION=VALUE, got {name!r}")
        options: dict[str, Any] = {}
        for word in words[1:]:
            option, equals, value = word.partition("=")
            if not equals:
                raise ValueError(f"backend {name!r}: expected OPTION=VALUE after the codec, got {word!r}")
            if option in options:
                raise ValueError(f"backend {name!r}: option {option!r} is given twice")
            try:
                options[option] = ast.literal_eval(value)
            except (SyntaxError, ValueError):
                options[option] = value
        return cls(words[0] if words else "uint8", **options)


def _name(codec: Codec, min_bytes: int) -> str:
    """Lower case, as torch makes all names."""
    short = {long: short for short, long in _SHORT.items()}
    words = [_PREFIX, short.get(codec.name, codec.name)]
    for field in fields(codec):
        value = getattr(codec, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if value != default:
            words.append(f"{field.name}={value!r}")
    if min_bytes != MIN_BYTES:
        words.append(f"min_bytes={min_bytes}")
    return ":".join(words).lower().replace(" ", "")


_made: dict[str, Backend] = {}


def _register(backend: Backend) -> None:
    name = str(backend)
    known = _made.setdefault(name, backend)
    if known.codec != backend.codec:
        raise ValueError(f"Backend: {known.codec!r} and {backend.codec!r} would both be called {name!r}")
    if name not in dist.Backend.backend_list:

        def create(options: Any, pg_options: Any = None) -> Any:
            from bagua.backend.process_group import create_process_group

            return create_process_group(backend, options, pg_options)

        dist.Backend.register_backend(name, create, extended_api=True, devices=registration.DEVICES)
