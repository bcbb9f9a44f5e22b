"""Imports go downward only; importing bagua does nothing but import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "bagua"

# What each part of the package may import of the others. "public" is `bagua` itself: names in its __init__.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "comm": {"errors"},
    "codecs": set(),
    "topologies": set(),
    "exchanges": {"comm", "codecs", "topologies"},
    "optim": set(),
    "algorithms": {"exchanges", "comm", "codecs", "topologies", "optim"},
    "autotune": set(),
    "engine": {"algorithms", "autotune", "exchanges", "comm", "codecs", "errors"},
    "simulation": {"comm", "algorithms", "engine"},
    "nn": {"comm"},
    "checkpoint": {"algorithms", "comm", "engine", "exchanges"},
    "interop": {"algorithms", "codecs", "comm", "engine", "errors", "exchanges"},
    "data": {"comm", "errors"},
    "elastic": {"checkpoint", "comm", "errors"},
    "distributed": {"public", "errors", "net", "elastic"},
    "lab": set(),
    "net": set(),
    "bench": {"public", "errors", "comm", "lab", "net"},
    "cli": {"public", "errors", "distributed", "net"},
    "script": set(),
    "sys_perf": {"public"},
    "torch_api": {"public", "errors", "algorithms", "checkpoint", "comm", "data", "engine", "distributed", "optim"},
    "__init__": {
        "autotune",
        "checkpoint",
        "elastic",
        "interop",
        "nn",
        "comm",
        "codecs",
        "topologies",
        "exchanges",
        "algorithms",
        "engine",
        "errors",
        "optim",
        "simulation",
    },
}
# The packages below the engine that may talk to torch.distributed at all.
TALKS = {"comm"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, part of bagua) for every import of bagua in the file, at any depth, under TYPE_CHECKING too."""
    found: list[tuple[int, str]] = []
    package = path.relative_to(ROOT.parent).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + (path.name == "__init__.py")]) if node.level else ""
            base = f"{above}.{node.module}" if above and node.module else above or node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "bagua" else [base]
        for name in names:
            words = name.split(".")
            if words[0] == "bagua":
                part = words[1] if len(words) > 1 else "public"
                is_part = (ROOT / part).exists() or (ROOT / f"{part}.py").exists()
                found.append((node.lineno, part if is_part else "public"))
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    mine = part_of(path)
    assert mine in MAY_IMPORT, f"{mine} has no layer yet; give it one in {Path(__file__).name}"
    for line, other in imports(path):
        assert other == mine or other in MAY_IMPORT[mine], f"{path}:{line}: {mine} imports {other}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_comm_calls_collectives(path: Path) -> None:
    text = path.read_text()
    if part_of(path) not in TALKS:
        for node in ast.walk(ast.parse(text)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            runs = [n for n in names if n.startswith("torch.distributed") and not n.startswith("torch.distributed.run")]
            allowed = part_of(path) in (
                "checkpoint",
                "interop",
                "distributed",
                "cli",
                "torch_api",
                "simulation",
                "bench",
            )
            assert not runs or allowed, f"{path} imports {runs}"


def test_no_drawers() -> None:
    assert not [path for path in modules() if path.stem in ("utils", "util", "helpers", "misc", "common")]


def test_the_reader_of_imports_reads(tmp_path: Path) -> None:
    """The tests above would fail on an upward import."""
    assert (3, "errors") in [(3, part) for _, part in imports(ROOT / "comm" / "team.py")]
    assert "engine" in {part for _, part in imports(ROOT / "__init__.py")}
    assert "codecs" in {part for _, part in imports(ROOT / "exchanges" / "mix.py")}


PROBE = """
import os, sys, threading, time
import torch, torch.distributed
before = dict(os.environ), threading.active_count(), set(dir(torch.nn.Module)), set(dir(torch.Tensor))
loaded = set(sys.modules)
start = time.perf_counter()
import bagua
took = time.perf_counter() - start
after = dict(os.environ), threading.active_count(), set(dir(torch.nn.Module)), set(dir(torch.Tensor))
assert before == after, "import bagua has side effects"
assert not torch.distributed.is_initialized()
extra = {name.split(".")[0] for name in set(sys.modules) - loaded} - set(sys.stdlib_module_names)
assert extra == {"bagua"}, extra
assert not {"bagua.torch_api", "bagua.cli", "bagua.distributed"} & set(sys.modules)
print(took)
"""


def test_import_has_no_side_effects() -> None:
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
