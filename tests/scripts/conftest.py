"""The ssh server that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scripts.ssh_server import SshServer, missing, start


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """An sshd on loopback."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    made = start(tmp_path_factory.mktemp("ssh"))
    yield made
    made.close()
