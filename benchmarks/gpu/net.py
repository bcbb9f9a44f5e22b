"""Part 8: whether NCCL loads Bagua-Net, by NCCL's own log.

With one rank NCCL opens its network when a communicator is made, and its log names the one it uses; nothing is sent.
Two ranks on one GPU, each with a host id of its own, send through it over the loopback device.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from bagua.net.plugin import environment, plugin_path
from benchmarks.gpu.pair import train_two
from benchmarks.gpu.record import Record, Skip

__all__ = ["run"]

_ROOT = Path(__file__).resolve().parents[2]
_ALONE = """
import torch
import torch.distributed as dist
from benchmarks.gpu import mirror
torch.cuda.set_device(0)
pg = mirror.nccl(dist.HashStore())
x = torch.ones(4, device="cuda")
pg.allreduce([x], dist.AllreduceOptions()).wait()
torch.cuda.synchronize()
pg.shutdown()
"""


def run(record: Record) -> None:
    """Checks only."""
    with record.check("the plugin can be loaded into a process"):
        import ctypes

        try:
            path = plugin_path()
        except RuntimeError as error:
            raise Skip(str(error)) from error
        ctypes.CDLL(str(path))
    if record.checks[-1]["status"] == "skipped":
        return
    on_gpu = torch.cuda.is_available() and not record.dry
    with record.check("NCCL's log of one rank names it") as entry:
        if not on_gpu:
            raise Skip("dry run")
        env = {**os.environ, "PYTHONPATH": str(_ROOT), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
        env.update(environment(env))
        done = subprocess.run([sys.executable, "-c", _ALONE], env=env, capture_output=True, text=True, timeout=50)
        lines = [
            line for line in (done.stdout + done.stderr).splitlines() if re.search("(?i)bagua|plugin|network", line)
        ]
        entry["log"] = lines[:40]
        assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
        assert any("Bagua" in line for line in lines), "the log does not name Bagua; see log in the JSON file"
    with record.check("two ranks on one GPU send through it") as entry:
        if not on_gpu:
            raise Skip("dry run")
        found = train_two("nccl", plugin=True)
        entry.update(found)
        assert any("Bagua" in line for line in found["nccl_log"]), "NCCL used another network; see nccl_log"
