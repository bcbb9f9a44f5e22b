"""Load and start the example scripts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_digits() -> ModuleType:
    """Import examples/digits.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("digits", ROOT / "examples" / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, outside any job, and return what it printed."""
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in job}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
