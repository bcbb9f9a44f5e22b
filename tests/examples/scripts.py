"""Load and start the example scripts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips tests where these are not installed, without an import of them in every worker, which takes seconds."""
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def load_digits() -> ModuleType:
    """Import examples/digits.py."""
    return load_script("digits")


def load_script(name: str) -> ModuleType:
    """Import a file of examples/ anew, which is a script and in no package; it finds those beside it."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.path.insert(0, str(ROOT / "examples"))
    sys.modules[name] = module  # where dataclasses look for it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "examples"))
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
    return module


def start(*words: str | Path, wait_s: float = 150) -> subprocess.CompletedProcess[str]:
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
        timeout=wait_s,
        check=False,
    )
