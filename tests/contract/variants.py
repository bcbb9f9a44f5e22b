"""A codec with its defaults, and with those options that change the layout of its wires."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields

from bagua.codecs import Codec

__all__ = ["variants"]


def variants(cls: type[Codec]) -> list[Codec]:
    """Defaults; a block that fits no row, with more of its elements; one for a whole row, if it can be; a trellis."""
    names, found = {field.name for field in fields(cls)}, [cls()]
    if "block" in names:
        more = {"ratio": 0.1} if "ratio" in names else {}
        for block in (94, 88, None):  # not every codec takes every length
            with suppress(ValueError):
                found.append(cls(block=block, **more))  # pyright: ignore[reportCallIssue]
    if "states" in names:
        found.append(cls(states=8))  # pyright: ignore[reportCallIssue]
    return list(dict.fromkeys(found))
