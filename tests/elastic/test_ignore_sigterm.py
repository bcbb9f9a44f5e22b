"""Workers of a DataLoader that outlive the launcher's SIGTERM, and not the script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
from bagua import elastic

def main():
    global loader  # is there at the end
    loader = DataLoader(
        torch.arange(8.0), num_workers=2, worker_init_fn=elastic.ignore_sigterm,
        persistent_workers=sys.argv[1] == "persistent", multiprocessing_context=sys.argv[2],
    )
    batches = iter(loader)
    next(batches), next(batches)  # one of each worker: both have begun
    print(*[worker.pid for worker in batches._workers], flush=True)
    input()
    print(sum(1 for _ in batches), flush=True)
    for _ in range(2):
        assert len(list(loader)) == 8
    if sys.argv[3] == "fails":
        raise ValueError("on purpose")

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("kept", "start", "end"),
    [
        ("persistent", "fork", "well"),
        ("persistent", "fork", "fails"),
        ("persistent", "spawn", "well"),
        ("new", "fork", "well"),
    ],
)
def test_workers_outlive_sigterm_and_end_with_the_script(tmp_path: Path, kept: str, start: str, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), kept, start, end]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        try:
            assert ran.stdout is not None
            workers = [int(each) for each in ran.stdout.readline().split()]
            assert len(workers) == 2
            for pid in workers:
                os.kill(pid, signal.SIGTERM)
            out, err = ran.communicate("\n", timeout=120)
        finally:
            ran.kill()
    assert out == "6\n", err
    assert ran.returncode == (0 if end == "well" else 1)
    assert ("ValueError: on purpose" in err) == (end == "fails")
    assert "exited unexpectedly" not in err
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
