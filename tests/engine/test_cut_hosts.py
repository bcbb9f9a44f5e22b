"""The cable of a host is pulled: no connection is closed, and every wait ends all the same, on that host too."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bagua.lab import Cluster, LabError
from tests.launch.launching import ROOT

pytestmark = [pytest.mark.lab, pytest.mark.slow]
LIMIT_S = 90  # a wait without end; the bound is the timeout of 8 s and 10 more, of a machine that has the time


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "decentralized", "async"])
@pytest.mark.parametrize("cut", [0, 2])
def test_a_silent_cut(tmp_path: Path, cut: int, algorithm: str) -> None:
    """Of the host that serves the store, and of another one."""
    try:
        cluster = Cluster(3, mode="namespaces", wire="relay")
    except LabError as error:
        pytest.skip(f"no cluster on this machine: {error}")
    with cluster:
        command = [sys.executable, str(ROOT / "tests/engine/cut_host.py"), algorithm, str(tmp_path)]
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        processes = cluster.launch(command, env=env)
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("trains*"))) < 3:
            assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
            time.sleep(0.05)
        cluster.hosts[cut].cut()
        codes = [process.wait(LIMIT_S) for process in processes]
    assert codes == [1, 1, 1]
    messages = {rank: (tmp_path / f"error{rank}").read_text() for rank in range(3)}
    for rank in {0, 1, 2} - {cut}:
        assert f"rank {cut}" in messages[rank], messages
    if cut:
        assert "rank 0, which serves the store, gave no answer" in messages[cut], messages
