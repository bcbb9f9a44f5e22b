"""The files in deploy/, as the tests read them."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bagua.distributed.run import get_args_parser

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def read_yaml(name: str) -> dict[str, Any]:
    """The one document of a file."""
    yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (document,) = yaml.safe_load_all((DEPLOY / name).read_text())
    return document


def check_command(words: list[str]) -> Namespace:
    """`bagua run` takes the flags, and the script and its own flags exist; returns what was parsed."""
    assert words[:2] == ["bagua", "run"]
    args = get_args_parser().parse_args(words[2:])
    script = ROOT / args.training_script
    assert script.is_file()
    flags = [word for word in args.training_script_args if word.startswith("--")]
    source = script.read_text() + (ROOT / "examples" / "digits.py").read_text()
    assert flags and all(f'"{flag}"' in source for flag in flags)
    return args


def output(*command: str | Path, **options: Any) -> str:
    """What a program prints; it must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=140, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
