"""The site holds every page, every public name and every file that pages link to; `make docs` builds it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import bagua
from benchmarks.figures.__main__ import main as write_figures
from tests.docs.markdown import ROOT

DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text()
# Packages that are not in `bagua.__all__`; of `bagua.autotune` only `bagua.Autotune` counts.
MORE = ("errors", "simulation", "testing")


def test_every_page_is_in_the_nav() -> None:
    listed = re.findall(r"([\w./-]+\.md)$", CONFIG.split("\nnav:\n", 1)[1], re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def test_the_nav_is_grouped() -> None:
    groups = re.findall(r"^  - ([^:]+):", CONFIG.split("\nnav:\n", 1)[1], re.MULTILINE)
    assert groups == ["Home", "Run", "Train", "Data", "Network", "Help", "Reference"]


def test_every_formula_can_be_typeset() -> None:
    convert = pytest.importorskip("latex2mathml.converter", reason="pip install '.[docs]'").convert
    formulas = [
        each for path in DOCS.rglob("*.md") for each in re.findall(r"(?ms)^\$\$\n(.*?)\n\$\$$", path.read_text())
    ]
    assert len(formulas) >= 11
    assert all("<merror" not in convert(each) for each in formulas)


def test_the_site_is_built_without_its_checks() -> None:
    """`make docs` runs MkDocs only; what takes minutes is `make docs-check`."""
    recipes = dict(re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert recipes["docs"].count("\n") == 1 and "mkdocs build" in recipes["docs"]
    assert all(
        word in recipes["docs-check"] for word in ("tests.parity.page", "benchmarks.figures", "tests/docs", "slow or")
    )


def test_the_site_needs_no_torch() -> None:
    """Its rule installs MkDocs into an empty environment: a minute, where torch and the compiler take several."""
    makefile = (ROOT / "Makefile").read_text()
    (needs,) = re.findall(r"^\$\(DOCS_STAMP\): (.*)$", makefile, re.MULTILINE)
    assert "$(STAMP)" not in needs
    assert re.search(r"^docs: \$\(DOCS_STAMP\) ", makefile, re.MULTILINE)
    assert re.search(r"^docs-check: \$\(STAMP\) \$\(DOCS_STAMP\) ", makefile, re.MULTILINE)


def test_the_reference_says_for_its_source_how_it_is_made() -> None:
    """The site leaves that line out, which it finds by its first words."""
    (first_words,) = re.findall(r'^MADE = re.compile\(r"\^([^.]+) \.', (DOCS / "hooks.py").read_text(), re.MULTILINE)
    for page in (DOCS / "reference").glob("*.md"):
        assert f"\n{first_words} " in page.read_text(), page.name
        assert page.read_text().count("`:::`") == 1, page.name


def public_names() -> set[str]:
    """Of `bagua` and of the packages below it that users import."""
    packages = {name for name in bagua.__all__ if isinstance(getattr(bagua, name), types.ModuleType)} | set(MORE)
    names = {f"bagua.{name}" for name in set(bagua.__all__) - packages}
    for package in packages:
        names |= {f"bagua.{package}.{name}" for name in import_module(f"bagua.{package}").__all__}
    return names


def test_every_public_name_is_in_the_reference() -> None:
    """By any of its names: `bagua.Guard` is `bagua.engine.Guard`."""
    pages = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    described = {identity(name) for name in re.findall(r"^::: (bagua\.\S+)$", pages, re.MULTILINE)}
    missing = {name for name in public_names() if identity(name) not in described}
    assert not missing


def identity(name: str) -> object:
    """The object of that name; what cannot be told apart by identity, by its name."""
    package, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(package), attribute)
    except (AttributeError, ModuleNotFoundError):
        found = import_module(name)
    except ImportError as error:
        if "pip install 'bagua[" not in str(error):
            raise
        return name  # a class that derives from one of a package that is not installed
    return found if inspect.isclass(found) or callable(found) or inspect.ismodule(found) else name


def test_figures_are_those_of_the_newest_results(capsys: pytest.CaptureFixture[str]) -> None:
    code = write_figures(["--check"])
    assert code == 0, capsys.readouterr().out + "write them with: python -m benchmarks.figures"


def test_figures_differ_where_results_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail."""
    monkeypatch.setattr("benchmarks.figures.__main__.FOLDER", tmp_path)
    assert write_figures([]) == 0 and write_figures(["--check"]) == 0
    (tmp_path / "choice.svg").write_text("<svg/>")
    assert write_figures(["--check"]) == 1


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="mkdocs is not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "getting-started.html").read_text()
    assert "source/examples/digits.py.html" in page
    assert (tmp_path / "site" / "source" / "examples" / "digits.py.html").exists()
    search = (tmp_path / "site" / "search" / "search_index.js").read_text()
    assert all(word in search for word in ("AdamW", "WAN", "Requirements"))
    assert ".json.html" not in search, "results are pages, but not found by search"
    assert "<wbr>" in (tmp_path / "site" / "compatibility.html").read_text()
    assert 'src="assets/iframe-worker.js"' in (tmp_path / "site" / "index.html").read_text()
    assert "steps.svg#only-light" in (choosing := (tmp_path / "site" / "choosing.html").read_text())
    assert "steps-dark.svg#only-dark" in choosing
    assert not any("<code>:::</code>" in path.read_text() for path in (tmp_path / "site" / "reference").glob("*.html"))
    assert "<mfrac>" in (tmp_path / "site" / "algorithms" / "qadam.html").read_text()
    everything = "".join(path.read_text() for path in (tmp_path / "site").rglob("*.html"))
    assert not re.search(r'(src|<link[^>]*href)="https?://', everything), "nothing is loaded from elsewhere"
