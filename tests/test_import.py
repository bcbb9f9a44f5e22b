"""What `import bagua` imports, and what it leaves to the first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import bagua

LAZY = """
import sys
import bagua
heavy = {"torch", "numpy", "bagua.data", "bagua.lab", "bagua.net"} & set(sys.modules)
assert not heavy, heavy
assert bagua.lab.Cluster.__name__ == "Cluster"
assert bagua.net.enable.__name__ == "enable"
assert "torch" not in sys.modules
assert bagua.data.CachedDataset.__name__ == "CachedDataset"
assert {"data", "lab", "net"} <= set(bagua.__all__) & set(dir(bagua))
"""


@pytest.mark.process
def test_the_compiler_is_not_imported() -> None:
    """Hooks that it must not trace are marked where an optimizer is followed, which has imported it."""
    code = "import sys, bagua; bagua.distribute; assert 'torch' in sys.modules and 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True, timeout=120)


@pytest.mark.process
def test_packages_are_imported_at_their_first_use() -> None:
    subprocess.run([sys.executable, "-c", LAZY], cwd=Path(__file__).parents[1], check=True, timeout=120)


def test_earlier_names_are_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr("bagua.engine.distributed_module.pause", lambda module: called.append(("pause", module)))
    monkeypatch.setattr(
        "bagua.engine.distributed_module.average_parameters", lambda module: called.append(("average", module))
    )
    module = object()
    bagua.abort(module)  # type: ignore[arg-type]
    bagua.average(module)  # type: ignore[arg-type]
    assert called == [("pause", module), ("average", module)]
