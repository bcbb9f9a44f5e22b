"""Options of a framework's user: the algorithm's and those of `bagua.distribute`."""

from __future__ import annotations

import pytest

from bagua.algorithms.auto import Auto
from bagua.interop.engine_options import split_options


def test_auto_is_a_name_too() -> None:
    made, rest = split_options("auto", {"allow": "exact", "bucket_bytes": 1 << 20})
    assert isinstance(made, Auto)
    assert made.allow == "exact"
    assert rest == {"bucket_bytes": 1 << 20}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="algorithm 'autos' is unknown"):
        split_options("autos", {})
