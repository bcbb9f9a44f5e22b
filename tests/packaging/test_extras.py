"""What the packages import besides torch is in an extra, and an error about a missing package names that extra."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import re
import sys
from pathlib import Path

import pytest

from bagua.bench import main as bench

ROOT = Path(__file__).resolve().parents[2]
OURS = {"bagua", "lightning_bagua", "benchmarks", "examples", "tests"}
# Of the modules whose name is not that of their package in an index.
PACKAGE = {
    "PIL": "pillow",
    "opentelemetry": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
    "pytorch_lightning": "pytorch-lightning",
    "sklearn": "scikit-learn",
}
# Imports that no extra provides, and why.
WITHOUT_EXTRA = {
    "triton": "comes with torch's builds for CUDA; without it the codecs run on torch operators",
    "PIL": "read from the cache only if the caller put an image there",
    "deepspeed": "a baseline of `bagua bench`, which says that it is not installed",
    "horovod": "likewise",
    "lightning_fabric": "comes with pytorch_lightning",
    "pytorch_lightning": "the other name of lightning, for those who have it",
}
# An import statement, or a call that imports or looks for a module by its name.
IMPORT = re.compile(
    r"""^[ \t]*from (\w+)[\w.]* import |^[ \t]*import (\w+)[\w.]*(?: as \w+)?$"""
    r"""|\b(?:import_module|find_spec|missing|optional_package)\("(\w+)[\w.]*\"""",
    re.M,
)
FOR_DEVELOPERS = {"dev", "docs", "interop-tests", "deploy-tests", "dist-tests"}


def extras() -> dict[str, set[str]]:
    """Names of packages in each extra of pyproject.toml. The table is plain enough for Python 3.10, without tomllib."""
    table = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    found = {name: ast.literal_eval(body) for name, body in re.findall(r"^([\w-]+) = (\[.*?\])$", table, re.M | re.S)}
    return {name: {re.split(r"[\[><=!~; ]", line)[0] for line in lines} for name, lines in found.items()}


@functools.cache
def third_party(folder: str) -> dict[str, set[str]]:
    """Top-level names that the modules of a folder import anywhere, lazily too, and the files that do."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / folder).rglob("*.py"):
        beside = {other.stem for other in path.parent.glob("*.py")} if folder == "examples" else set()
        ours = sys.stdlib_module_names | OURS | beside | {"torch"}
        for match in IMPORT.finditer(path.read_text()):
            name = match[match.lastindex or 0]
            if name not in ours:
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def test_what_is_imported_is_in_an_extra() -> None:
    provided = set().union(*(names for extra, names in extras().items() if extra not in FOR_DEVELOPERS))
    found = third_party("bagua") | third_party("lightning_bagua")
    assert {"lmdb", "accelerate", "transformers", "matplotlib"} <= set(found)
    without = {name: files for name, files in found.items() if PACKAGE.get(name, name) not in provided}
    assert without.keys() == WITHOUT_EXTRA.keys(), without


def test_what_is_in_an_extra_is_imported() -> None:
    found = {**third_party("bagua"), **third_party("lightning_bagua"), **third_party("examples")}
    used = {PACKAGE.get(name, name) for name in found}
    for extra, names in extras().items():
        if extra not in FOR_DEVELOPERS:
            assert names <= used, extra


def test_an_optional_package_is_asked_for_with_its_extra() -> None:
    asked = [
        found.groups()
        for path in (ROOT / "bagua").rglob("*.py")
        for found in re.finditer(r'\boptional_package\(\s*"(\w+)[\w.]*",\s*"([\w-]+)"', path.read_text())
    ]
    assert asked
    for name, extra in asked:
        assert PACKAGE.get(name, name) in extras()[extra], name


def test_an_extra_for_users_is_in_the_environment_of_the_tests() -> None:
    mentioned = extras()
    tested = mentioned["dev"] | mentioned["demo"] | mentioned["interop-tests"]
    tested |= {"opentelemetry-api"} if "opentelemetry-sdk" in tested else set()  # the one needs the other
    for extra, names in mentioned.items():
        assert extra in FOR_DEVELOPERS or names <= tested, extra


@pytest.mark.parametrize(
    ("missing", "module", "extra"),
    [
        ("accelerate", "bagua.interop.accelerate", "accelerate"),
        ("transformers", "bagua.interop.transformers", "transformers"),
        ("lightning", "lightning_bagua", "lightning"),
    ],
)
def test_a_module_that_needs_a_package_names_the_extra(
    missing: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == module or name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    if missing == "lightning":
        monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
        monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    else:
        monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]
    assert missing in extras()[extra]
    with pytest.raises(ImportError, match=rf"needs {missing}.*: pip install 'bagua\[{extra}\]'$"):
        importlib.import_module(module)


def test_figures_name_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def plot_report(*_: object) -> list[Path]:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(bench.plots, "plot_report", plot_report)
    bench._draw(argparse.Namespace(plots=tmp_path), {})
    assert "matplotlib" in extras()["demo"] and "pip install 'bagua[demo]'" in capsys.readouterr().err
