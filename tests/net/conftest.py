"""Without the compiled plugin there is nothing to test here."""

from __future__ import annotations

import pytest

from bagua.net.driver import LIBRARY
from bagua.net.plugin import plugin_path


@pytest.fixture(autouse=True)
def _built() -> None:
    try:
        plugin_path()
    except RuntimeError as error:
        pytest.skip(str(error))
    if not LIBRARY.exists():
        pytest.skip("the driver was not built")
