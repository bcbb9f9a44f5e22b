"""Part 13: a fault-tolerant job with CUDA models: a rank is killed and comes back, and the others train on.

Each rank is a host of `bagua.lab`; they share the GPU. Groups are of gloo, through host memory, and of NCCL.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.record import Record, Skip

__all__ = ["check", "run"]

_ROOT = Path(__file__).resolve().parents[2]
_JOBS = tuple(
    (name, backend, forked)
    for backend in ("gloo", "nccl")
    for name in ("bytegrad", "low_precision_decentralized")
    for forked in ((False, True) if name == "bytegrad" else (False,))
)
_HOSTS = 3
_LIMIT_S = 110


def run(record: Record) -> None:
    """One check for each algorithm and backend, and for ranks that are forked (`--preload`)."""
    on_gpu = torch.cuda.is_available() and not record.dry
    for algorithm, backend, forked in _JOBS if on_gpu else _JOBS[:1]:
        job(record, algorithm, backend, forked, on_gpu)


def job(record: Record, algorithm: str, backend: str, forked: bool, on_gpu: bool) -> None:
    """The check of one job; what it printed stays beside the record, as `faults-ALGORITHM-BACKEND.log`."""
    name, how = f"{algorithm}-{backend}{'-preload' if forked else ''}", " with --preload" if forked else ""
    with (
        record.check(f"{algorithm} over {backend}{how}: a rank is killed and comes back") as entry,
        tempfile.TemporaryDirectory() as at,
    ):
        log = (record.path.parent if record.path is not None else Path(at)) / f"faults-{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        lab = [sys.executable, "-m", "bagua", "lab", "run", "--hosts", str(_HOSTS), "--keep-going", "--"]
        words = [sys.executable, "-m", "bagua", "run", "--fault-tolerant", "--max-restarts", "1"]
        words += ["--preload", "torch,bagua"] if forked else []
        words += ["benchmarks/gpu/faults_rank.py", at, algorithm, "cuda" if on_gpu else "cpu", backend]
        began = time.monotonic()
        code = _logged([*lab, *words], log)
        entry["job_s"] = round(time.monotonic() - began, 2)
        text = log.read_text()
        if code and "LabError" in text:
            raise Skip(f"no emulated hosts: {text[-300:]}")
        files = [Path(at) / f"host-{host}.json" for host in range(_HOSTS)]
        assert code is not None, f"not done after {_LIMIT_S} s: {text[-2500:]}"
        assert code == 0 and all(map(Path.exists, files)), text[-2500:]
        entry["stalled_s"], entry["right"] = check([json.loads(file.read_text()) for file in files])


def _logged(words: Sequence[str], log: Path) -> int | None:
    """Run a command with its output in a file; its exit status, or None if it was ended at the limit."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=_ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # the lab then ends its hosts
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            return None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def check(hosts: Sequence[dict[str, Any]]) -> tuple[list[float], float]:
    """Seconds that the ranks which stayed stalled at changes of the members, and the share of the test images.

    Args:
        hosts: what their ranks have written: for each change how many were lost and joined, and seconds; and the share.

    Raises:
        AssertionError: nobody was lost, nobody joined, or the model is not trained.
    """
    stayed = [change for host in hosts[:-1] for change in host["changes"]]
    assert any(lost for lost, _, _ in stayed), "nobody was lost"
    assert any(joined for _, joined, _ in stayed), "nobody joined"
    right = min(host["right"] for host in hosts)
    assert right > 0.8, f"{right:.1%} of the test images right"
    return [seconds for _, _, seconds in stayed], right
