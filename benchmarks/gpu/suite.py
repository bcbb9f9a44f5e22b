"""Part 2: the tests that take a CUDA device, whatever of pytest's plugins is installed."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.gpu.record import Record, Skip

__all__ = ["TESTS", "command", "pytest_into", "run", "select"]

_ROOT = Path(__file__).resolve().parents[2]
TESTS = _ROOT / "tests"
_MENTIONS = re.compile(r"\bmark\.gpu\b|\bdevice: torch\.device\b|\bon_gpu\b|\bcodec: Codec\b")
_DRY = ("tests/engine/test_gpu.py", "tests/engine/test_streams.py")


def run(record: Record) -> None:
    """One check for each test file."""
    files, left_out = select(TESTS)
    record.facts["left_out"] = left_out
    chosen = [_ROOT / name for name in _DRY] if record.dry else files
    pytest_into(record, chosen, None if record.dry else "gpu and not slow")
    for file, missing in left_out.items():
        with record.check(file):
            raise Skip(f"imports {', '.join(missing)}, not installed")


def pytest_into(
    record: Record, files: Sequence[Path], marker: str | None, jobs: int = 12, env: Mapping[str, str] | None = None
) -> None:
    """Run pytest, and make a check of each file.

    Args:
        record: of the part.
        files: with tests.
        marker: which of them; None: all.
        jobs: files at once, with pytest-xdist.
        env: more of the environment.
    """
    with record.check("pytest is installed"):
        if importlib.util.find_spec("pytest") is None:
            raise RuntimeError("missing; install it from a folder of wheels: pip install --no-index -f DIR pytest")
    if record.checks[-1]["status"] == "failed":
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        done = subprocess.run(
            command(files, report, marker, jobs),
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT), **(env or {})},
            capture_output=True,
            text=True,
        )
        print(done.stdout[-3000:], done.stderr[-1000:], sep="\n")
        with record.check("pytest ran") as entry:
            entry["tail"] = done.stdout[-3000:]
            # 5: nothing was selected, as without a GPU
            assert done.returncode in ((0, 1, 5) if record.dry else (0, 1)), done.stdout[-500:] + done.stderr[-500:]
        if report.exists():
            _files(record, report)


def command(files: Sequence[Path], report: Path, marker: str | None, jobs: int = 12) -> list[str]:
    """How pytest is called. The repository's own options need plugins that may be missing, and make warnings errors."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    words += ["-o", "filterwarnings=default", f"--junitxml={report}", "-rfE", "--tb=short"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        words += ["-o", "timeout=120"]
    if torch.cuda.is_available() and importlib.util.find_spec("xdist") is not None:
        words += ["-n", str(max(1, min(jobs, (os.cpu_count() or 2) - 2))), "--dist", "worksteal"]
    if marker is not None:
        words += ["-m", marker]
    return [*words, *map(str, files)]


def select(root: Path) -> tuple[list[Path], dict[str, list[str]]]:
    """Test files with tests for a device, and those among them that import what is not installed."""
    files, left_out = [], {}
    for path in sorted(root.rglob("test_*.py")):
        text = path.read_text()
        if not _MENTIONS.search(text):
            continue
        missing = [name for name in _imports(text) if importlib.util.find_spec(name) is None]
        if missing:
            left_out[str(path.relative_to(root.parent))] = missing
        else:
            files.append(path)
    return files, left_out


def _imports(text: str) -> list[str]:
    """Packages that a module imports when it is imported."""
    found: dict[str, None] = {}
    for node in ast.parse(text).body:
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        found.update(dict.fromkeys(name.split(".")[0] for name in names))
    return list(found)


def _files(record: Record, report: Path) -> None:
    """A check for each file that pytest reported."""
    by_file: dict[str, list[ET.Element]] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        by_file.setdefault(case.get("classname", "") or case.get("name", ""), []).append(case)
    for name, cases in by_file.items():
        bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        skipped = [case for case in cases if case.find("skipped") is not None]
        with record.check(name) as entry:
            entry["tests"], entry["skipped"] = len(cases), len(skipped)
            if bad:
                entry["failures"] = {case.get("name", ""): _text(case)[:2000] for case in bad}
                raise AssertionError(f"{len(bad)} of {len(cases)} failed: {', '.join(entry['failures'])[:300]}")
            if len(skipped) == len(cases):
                reason = skipped[0].find("skipped")
                raise Skip(f"all {len(cases)}: {'' if reason is None else reason.get('message', '')}")


def _text(case: ET.Element) -> str:
    bad = [each for each in case if each.tag in ("failure", "error")]
    return "\n".join(f"{each.get('message', '')}\n{each.text or ''}" for each in bad)
