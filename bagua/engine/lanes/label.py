"""Labels of launches: in messages they say which launch, in profiles of which kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch._C._profiler import _RecordFunctionFast  # torch.profiler.record_function takes 16 us instead of 0.6

__all__ = ["Label", "span"]


class Label(NamedTuple):
    """What a launch is called.

    Attributes:
        text: in messages, with step and bucket.
        kind: in a profile; equal for all launches of a kind, so that `key_averages()` adds them up.
        details: in a profile, where it was made with `record_shapes=True`.
    """

    text: str
    kind: str
    details: Mapping[str, str | int] = {}

    def __str__(self) -> str:
        return self.text


def span(verb: str, label: Label | str = "") -> _RecordFunctionFast:
    """A context that a profile shows as `bagua::verb kind`."""
    if isinstance(label, Label):
        return _RecordFunctionFast(f"bagua::{verb} {label.kind}", (), dict(label.details))
    return _RecordFunctionFast(f"bagua::{verb} {label}" if label else f"bagua::{verb}")
