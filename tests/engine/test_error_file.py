"""The launcher learns why a rank failed that has called nothing but `bagua.distribute`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch, torch.distributed as dist
import bagua
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
bagua.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
raise ValueError("on purpose")
"""


@pytest.mark.process
def test_distribute_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "attempt" / "0" / "error.json"
    path.parent.mkdir(parents=True)
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    ended = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    record = json.loads(path.read_text())["message"]
    assert record["message"] == "ValueError: on purpose"
    assert "Traceback" in record["extraInfo"]["py_callstack"]
