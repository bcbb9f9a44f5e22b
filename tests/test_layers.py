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
    "registry": set(),
    "signals": set(),
    "held": set(),
    "own_address": set(),
    "sampling": set(),
    "comm": {"errors", "own_address"},
    "codecs": {"registry"},
    "topologies": {"registry"},
    "exchanges": {"comm", "codecs", "topologies"},
    "optim": {"held"},
    "algorithms": {"registry", "exchanges", "comm", "codecs", "topologies", "optim"},
    "autotune": set(),
    "engine": {
        "algorithms",
        "autotune",
        "codecs",
        "comm",
        "errors",
        "exchanges",
        "held",
        "membership",
        "optim",
        "status",
    },
    "auto": {"algorithms", "bench", "comm", "engine", "plan"},
    "simulation": {"comm", "algorithms", "engine"},
    "testing": {"public", "algorithms", "codecs", "comm", "registry", "simulation"},
    "contrib": {"algorithms", "codecs", "comm", "exchanges", "optim", "topologies"},
    "nn": {"comm"},
    "moe": {"codecs", "comm", "engine", "errors"},
    "checkpoint": {"algorithms", "comm", "engine", "errors", "exchanges"},
    "metrics": {"public", "engine"},
    "interop": {"algorithms", "checkpoint", "codecs", "comm", "engine", "errors", "exchanges"},
    "registration": {"backend"},
    "backend": {"algorithms", "codecs", "comm", "engine", "errors", "exchanges", "registration"},
    "data": {"comm", "errors", "sampling"},
    "elastic": {"checkpoint", "comm", "engine", "errors", "sampling"},
    "membership": set(),
    "status": {"membership"},
    "distributed": {"public", "errors", "net", "elastic", "membership", "own_address", "signals", "status"},
    "top": {"distributed", "membership", "status"},
    "lab": {"signals"},
    "net": set(),
    "bench": {"public", "errors", "comm", "lab", "net"},
    "plan": {"public", "bench", "codecs", "comm", "engine", "exchanges", "lab"},
    "doctor": {"public", "algorithms", "auto", "codecs", "comm", "engine", "errors", "net", "own_address", "plan"},
    "cli": {"public", "codecs", "errors", "distributed", "net", "signals"},
    "__main__": {"cli"},
    "script": {"signals"},
    "sys_perf": {"public"},
    "gone": set(),
    "version": {"public"},
    "bagua_define": set(),
    "service": {"gone"},
    "torch_api": {
        "public",
        "errors",
        "algorithms",
        "checkpoint",
        "comm",
        "data",
        "engine",
        "exchanges",
        "distributed",
        "gone",
        "moe",
        "optim",
    },
    "__init__": {
        "auto",
        "autotune",
        "backend",
        "checkpoint",
        "data",
        "elastic",
        "interop",
        "lab",
        "metrics",
        "moe",
        "net",
        "nn",
        "comm",
        "codecs",
        "topologies",
        "exchanges",
        "algorithms",
        "engine",
        "errors",
        "optim",
        "plan",
        "registration",
        "simulation",
        "testing",
    },
}
# The packages below the engine that may talk to torch.distributed at all.
TALKS = {"comm"}
# Those that name its types, launcher or checkpoints.
MAY_NAME_TORCH_DISTRIBUTED = {
    *("backend", "bench", "checkpoint", "cli", "distributed", "doctor", "interop", "registration", "simulation"),
    *("testing", "torch_api"),
}


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
                found.append((getattr(node, "lineno", 0), part if is_part else "public"))
    return found


def test_imports_go_downward() -> None:
    wrong: list[str] = []
    for path in modules():
        mine = part_of(path)
        assert mine in MAY_IMPORT, f"{mine} has no layer yet; give it one in {Path(__file__).name}"
        wrong += [
            f"{path}:{line}: {mine} imports {other}"
            for line, other in imports(path)
            if other != mine and other not in MAY_IMPORT[mine]
        ]
    assert not wrong, "\n".join(wrong)


def test_only_comm_calls_collectives() -> None:
    wrong: list[str] = []
    for path in modules():
        if part_of(path) in TALKS or part_of(path) in MAY_NAME_TORCH_DISTRIBUTED:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            runs = [n for n in names if n.startswith("torch.distributed") and not n.startswith("torch.distributed.run")]
            wrong += [f"{path} imports {name}" for name in runs]
    assert not wrong, "\n".join(wrong)


def test_no_drawers() -> None:
    """But for modules that have their name from the original and hold nothing but names."""
    drawers = [path for path in modules() if path.stem in ("utils", "util", "helpers", "misc", "common")]
    facade = ROOT / "torch_api"
    assert drawers == [facade / "model_parallel" / "moe" / "utils.py", facade / "utils.py"]
    for path in drawers:
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in body)


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
assert "bagua.engine" not in sys.modules, "what a command does not need is imported at its first use"
for name in bagua.__all__:
    assert getattr(bagua, name) is getattr(bagua, name), name
took = time.perf_counter() - start
after = dict(os.environ), threading.active_count(), set(dir(torch.nn.Module)), set(dir(torch.Tensor))
assert before == after, "import bagua has side effects"
assert not torch.distributed.is_initialized()
extra = {name.split(".")[0] for name in set(sys.modules) - loaded} - set(sys.stdlib_module_names)
assert extra == {"bagua"}, extra
assert not {"bagua.torch_api", "bagua.cli", "bagua.distributed"} & set(sys.modules)
print(took)
"""


@pytest.mark.process
def test_import_has_no_side_effects() -> None:
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
