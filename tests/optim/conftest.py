"""Fixtures of these tests."""

from __future__ import annotations

import pytest

from bagua.optim.fused import layout


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of a few ten thousand elements are stepped in pieces, as larger ones are otherwise."""
    monkeypatch.setattr(layout, "_PER_THREAD", 1 << 15)
