"""What the reference shows is the function or class of that name, not a module that is called the same."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.markdown import ROOT

NAMES = sorted(
    {
        name
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
    }
)


def file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def source_of(module: str, name: str) -> str:
    """Where readers of the source find `module.name`: "module" if they take it for a module, else its home."""
    package = file_of(module).parent
    is_package = file_of(module).name == "__init__.py"
    if is_package and ((package / f"{name}.py").exists() or (package / name).is_dir()):
        return "module"
    for node in ast.walk(ast.parse(file_of(module).read_text())):
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            home = ".".join([*above, *([node.module] if node.module else [])])
            return source_of(home, name) if home.split(".")[0] in ("bagua", "lightning_bagua") else home
    return module


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_shows_what_is_meant(name: str) -> None:
    holder, _, last = name.rpartition(".")
    try:
        module = importlib.import_module(holder)
    except ImportError as error:
        if "pip install 'bagua[" not in str(error):
            raise
        pytest.skip(str(error))
    meant = getattr(module, last)
    if not isinstance(meant, ModuleType):
        assert source_of(holder, last) != "module", f"{name}: name the module that defines it"


def test_the_resolver_sees_a_module_of_the_same_name() -> None:
    assert source_of("bagua.engine", "stats") == "module"
    assert source_of("bagua", "stats") == "bagua.engine.distributed_module"
    assert source_of("bagua.exchanges.mix", "mix") == "bagua.exchanges.mix"
