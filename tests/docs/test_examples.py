"""Every public function, and every class that users make, has examples in its docstring, and they run."""

from __future__ import annotations

import enum
import inspect
import json
import os
import re
import sys
from importlib import import_module
from typing import Any, get_origin

import pytest

import bagua
from tests.docs.markdown import ROOT
from tests.docs.run_examples import examples
from tests.fork_server import ForkServer
from tests.forked_process import run_forked

# Modules that users import from. Every function in their `__all__`, and every class that users make, has examples.
MODULES = (
    "bagua",
    "bagua.algorithms",
    "bagua.auto",
    "bagua.autotune",
    "bagua.backend",
    "bagua.checkpoint",
    "bagua.codecs",
    "bagua.contrib",
    "bagua.data",
    "bagua.elastic",
    "bagua.exchanges",
    "bagua.interop",
    "bagua.lab",
    "bagua.metrics",
    "bagua.moe",
    "bagua.net",
    "bagua.nn",
    "bagua.optim",
    "bagua.plan",
    "bagua.testing",
    "bagua.topologies",
)
# Public packages without examples, and why.
WITHOUT_EXAMPLES = {
    "bagua.torch_api": "the interface of Bagua 0.9, for existing scripts: docs/from-bagua.md",
    "lightning_bagua": "needs Lightning, which takes seconds to import: docs/lightning.md runs it",
}
NOT_MADE = {
    # Base classes and interfaces: docs/new-algorithm.md and docs/new-codec.md implement them.
    "bagua.Algorithm",
    "bagua.Context",
    "bagua.algorithms.Algorithm",
    "bagua.algorithms.Bucket",
    "bagua.algorithms.Context",
    "bagua.codecs.Codec",
    "bagua.exchanges.ElementwiseHook",
    "bagua.exchanges.Exchange",
    "bagua.exchanges.LerpHook",
    "bagua.exchanges.PayloadSource",
    "bagua.exchanges.Piece",
    "bagua.optim.TwoStage",
    "bagua.optim.WarmedUp",
    "bagua.topologies.Topology",
    # Results of functions.
    "bagua.Quality",
    "bagua.Simulation",
    "bagua.Stats",
    "bagua.StepStats",
    "bagua.algorithms.Available",
    "bagua.checkpoint.Loaded",
    "bagua.elastic.Resize",
    "bagua.elastic.Restored",
    "bagua.auto.Explanation",
    "bagua.auto.Link",
    "bagua.auto.Links",
    "bagua.auto.Row",
    "bagua.backend.CompressedProcessGroup",
    "bagua.backend.Traffic",
    "bagua.interop.CompressedFSDP",
    "bagua.interop.DDPHook",
    "bagua.lab.Host",
    "bagua.lab.HostReport",
    "bagua.lab.PairReport",
    "bagua.lab.Report",
    "bagua.metrics.Report",
    "bagua.moe.Routing",
    # What the tuner of `bagua.distribute(autotune=...)` consists of.
    "bagua.autotune.Measurement",
    "bagua.autotune.Order",
    "bagua.autotune.Outcome",
    "bagua.autotune.Settings",
    "bagua.autotune.Space",
    "bagua.autotune.Tuner",
    # They need packages: tests/interop/test_metrics.py runs their examples.
    "bagua.metrics.OpenTelemetry",
    "bagua.metrics.Prometheus",
    # It needs network namespaces: docs/lab.md runs it.
    "bagua.lab.Cluster",
    # Earlier names, whose docstrings lead to the new ones.
    "bagua.abort",
    "bagua.average",
}


def public() -> dict[str, Any]:
    """Functions and classes in the `__all__` of `MODULES`, without exceptions and enumerations."""
    found = {
        f"{module}.{name}": getattr(import_module(module), name) for module in MODULES for name in names_of(module)
    }
    return {name: value for name, value in found.items() if inspect.isroutine(value) or is_made(value)}


def names_of(module: str) -> list[str]:
    return list(import_module(module).__all__)


def is_made(value: object) -> bool:
    return inspect.isclass(value) and not issubclass(value, Exception | enum.Enum) and not get_origin(value)


PUBLIC = public()
NOT_BUILT = set() if (ROOT / "bagua/net/libnccl-net-bagua.so").exists() else {n for n in PUBLIC if "bagua.net." in n}
NAMES = sorted(set(PUBLIC) - NOT_MADE - NOT_BUILT)


@pytest.fixture(scope="module")
def outcomes(fork_server: ForkServer) -> dict[str, str]:
    command = [sys.executable, "-W", "error", "-m", "tests.docs.run_examples", *NAMES]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = {**alone, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = run_forked(fork_server, command, environment, ROOT, 140)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


def test_functions_are_found_and_what_has_no_example_fails() -> None:
    assert {"bagua.distribute", "bagua.Guard", "bagua.codecs.get", "bagua.optim.fuse", "bagua.moe.MoE"} <= set(NAMES)
    assert not examples("bagua.CommunicationError")


def test_every_public_module_is_looked_at() -> None:
    """A package of `bagua` that defines `__all__` and has a page of reference is in `MODULES`, or said why not."""
    reference = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    documented = {name.rpartition(".")[0] for name in re.findall(r"^::: ([\w.]+)$", reference, re.MULTILINE)}
    packages = {name for name in documented if (ROOT / name.replace(".", "/")).is_dir()}
    packages -= {name for name in packages if name.startswith(tuple(f"{each}." for each in WITHOUT_EXAMPLES))}
    assert packages <= {*MODULES, *WITHOUT_EXAMPLES}
    assert set(PUBLIC) >= NOT_MADE


def test_docstrings_open_with_what_the_name_is_or_does() -> None:
    """A whole sentence, which opens with a verb or with what the class is."""
    for name in bagua.__all__:
        value = getattr(bagua, name)
        if not (inspect.isroutine(value) or inspect.isclass(value)):
            continue
        first = (inspect.getdoc(value) or "").split("\n", 1)[0]
        assert first.endswith((".", ":")), f"bagua.{name}: {first!r}"
        assert not first.startswith(("What ", "How ", "When ", "Who ", "Within it", "Is ")), f"bagua.{name}: {first!r}"
