"""Fixtures of the tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.membership_store import serve_store


@pytest.fixture
def store() -> Iterator[str]:
    """Address of a store as of a launcher; another one for each job, since the numbers of epochs are parts of keys."""
    address, served = serve_store()
    yield address
    del served
