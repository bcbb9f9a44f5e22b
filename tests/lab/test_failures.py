"""A host that is cut off in mid-step: the others name it within the timeout, and nothing is left behind."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bagua.lab import Cluster, Link
from tests.lab.leftovers import assert_nothing_left, devices, mine

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 6


@pytest.mark.usefixtures("namespaces")
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_a_host_cut_off_in_mid_step_is_named(algorithm: str) -> None:
    before = devices()
    script = [sys.executable, str(Path(__file__).with_name("train_slowly.py")), str(TIMEOUT_S), algorithm]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    with Cluster(3, Link("30mbit", "1ms")) as cluster:
        spaces = mine(cluster)
        ranks = cluster.launch(script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert all(rank.stdout for rank in ranks)
        for line in iter(ranks[0].stdout.readline, ""):  # pyright: ignore
            if line.startswith("step 2 "):
                break
        time.sleep(0.2)  # 2 MB at 30 Mbit/s: the exchange has begun and is far from its end
        cluster.hosts[2].cut()
        cut_at = time.monotonic()
        outputs = [rank.communicate(timeout=TIMEOUT_S + 40)[0] for rank in ranks[:2]]
        assert [rank.returncode for rank in ranks[:2]] == [7, 7], outputs
        for rank, output in enumerate(outputs):
            said = re.search(r"after ([0-9.]+) s: (rank (\d).* step \d+ bucket \d.*)", output)
            assert said, output
            assert int(said[3]) == rank and "no response from rank 2" in said[2], (cut_at, outputs)
            assert float(said[1]) < TIMEOUT_S + 3 + 10, "the group's timeout, the meeting in the store, a busy machine"
        cluster.hosts[2].kill()
        assert ranks[2].communicate(timeout=60)[0].startswith("step 0")
    assert_nothing_left(spaces, cluster.folder)
    assert devices() == before
