"""Runs a benchmark in a process of its own, with few repeats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_quickly(name: str, folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """What `python -m benchmarks.NAME --quick` writes to its JSON file in `folder`, and to its output."""
    file = folder / f"{name}.json"
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(file), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout
