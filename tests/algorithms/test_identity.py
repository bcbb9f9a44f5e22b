"""To which algorithm a saved state belongs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import ClassVar

import pytest

import bagua.contrib
from bagua.algorithms import Algorithm, AsyncModelAverage, ByteGrad, Warmup
from bagua.algorithms.identity import same_state
from bagua.algorithms.registry import registry

EARLIER = (
    "AsyncModelAverage(sync_interval_ms=None, warmup_steps=0, hierarchical=None, max_alone_s={}, "
    "scale_second_moment=False)"
)


@dataclass(frozen=True)
class Patient(Algorithm):
    """With a limit, and other algorithms as options."""

    not_compared: ClassVar[tuple[str, ...]] = ("limit_s", "note")

    limit_s: float = 1.0
    note: tuple[str, ...] = ()
    inner: Algorithm | None = None


@pytest.mark.parametrize("limit", ["None", "5", "0.5", "inf", "1e-05"])
@pytest.mark.parametrize("now", [None, 30.0, math.inf])
def test_a_time_limit_is_not_compared(limit: str, now: float | None) -> None:
    assert same_state(EARLIER.format(limit), AsyncModelAverage(max_alone_s=now))
    warmup = f"Warmup(steps=3, first={ByteGrad()!r}, then={EARLIER.format(limit)})"
    assert same_state(warmup, Warmup(3, ByteGrad(), AsyncModelAverage(max_alone_s=now)))


def test_what_changes_numbers_is() -> None:
    saved = repr(AsyncModelAverage(max_alone_s=5.0))
    for other in (
        AsyncModelAverage(sync_interval_ms=10),
        AsyncModelAverage(warmup_steps=1),
        AsyncModelAverage(codec="eden", mean_moments=False),
        ByteGrad(),
        Warmup(3, "bytegrad", "async"),
    ):
        assert not same_state(saved, other) and not same_state(repr(other), AsyncModelAverage())
    assert not same_state(None, AsyncModelAverage())


def test_names_values_and_classes_are_told_apart() -> None:
    @dataclass(frozen=True)
    class Local(Patient):
        """Its name in a repr is no expression."""

    assert same_state(repr(Local(2.0, note=("a), limit_s=(", "b"))), Local(inner=None))
    assert same_state(repr(Local(2.0, inner=Patient(3.0))), Local(inner=Patient(4.0)))
    assert not same_state(repr(Local(2.0, inner=Patient(3.0))), Local(inner=None))
    assert not same_state(repr(Patient(2.0)), Local())
    assert not same_state("no expression (", Local())
    assert not same_state("(" * 10_000, Local())


def test_limits_of_time_are_declared() -> None:
    """A new option in seconds, or called a timeout, must be a deliberate decision."""
    classes = [registry[name] for name in registry.builtin()]
    classes += [kind for kind in vars(bagua.contrib).values() if isinstance(kind, type) and issubclass(kind, Algorithm)]
    assert {AsyncModelAverage, bagua.contrib.DecoupledDiLoCo} <= {*classes}
    for kind in classes:
        options = {each.name for each in fields(kind)}
        limits = {each for each in options if re.search("_s$|timeout", each)}
        assert limits <= set(kind.not_compared) <= options, kind
