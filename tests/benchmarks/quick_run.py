"""Runs a benchmark in a process of its own, with few repeats."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.fork_server import ForkServer
from tests.forked_process import run_forked

ROOT = Path(__file__).resolve().parents[2]


def run_quickly(server: ForkServer, name: str, folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """What `python -m benchmarks.NAME --quick` writes to its JSON file in `folder`, and to its output."""
    file = folder / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(file), *words]
    done = run_forked(server, command, {**os.environ, "PYTHONPATH": str(ROOT)}, ROOT, 150)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout
