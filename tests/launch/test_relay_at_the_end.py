"""A rank whose script ends stays for others whose bytes pass through it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bagua.comm.mesh import why_no_mesh
from tests.launch.launching import ROOT

pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(why_no_mesh()), reason=why_no_mesh() or "there is one")]
# Ranks 0 and 1 reach each other through rank 2, which ends while they go on for longer than it waits for anybody.
SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import bagua
from bagua.comm import shutdown
from bagua.comm.team import Team

shutdown._TIMEOUT_S = 0.5
if sys.argv[1] == "bagua":
    bagua.init_process_group("gloo")
else:
    dist.init_process_group("gloo")
team = Team.of(None, torch.device("cpu"))
team.routes = {(0, 1): 2}
groups = team.open("lane", native=True)
mesh, rank = groups.world.mesh, team.rank
if rank < 2:
    for step in range(40):
        time.sleep(0.05)
        got = torch.zeros(100_000)
        mesh.swap([(1 - rank, torch.full_like(got, rank + step))], [(1 - rank, got)])
        assert got.unique().tolist() == [1 - rank + step]
print(f"rank {rank} ends at {time.time()}", flush=True)
"""


@pytest.mark.parametrize("how", ["bagua", "torch"])
def test_a_rank_that_passes_bytes_on_ends_last(tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), how],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": port, "WORLD_SIZE": "3", "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    ended = time.time()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said
    assert all(f"rank {rank} ends at" in out for rank, (out, _) in enumerate(said))
    at = [float(out.split()[-1]) for out, _ in said]
    assert at[2] < min(at[0], at[1]) - 1, "the others went on"
    assert ended - max(at) < 20
