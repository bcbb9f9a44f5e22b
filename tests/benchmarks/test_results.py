"""The folder of results: what is in it is listed, and what the documentation cites is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
_FOLDER = re.compile(r"\b\d{4}-\d\d-\d\d-[a-z]+\b")
_PATH = re.compile(r"benchmarks/results/(\d{4}-[\w./-]*[\w])")
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
_ROW = re.compile(r"^\| .*\|$", re.MULTILINE)
CITING = sorted(
    path
    for folder in ("docs", "benchmarks", "bagua", "examples", "tests")
    for kind in ("*.md", "*.py")
    for path in (ROOT / folder).rglob(kind)
) + sorted(ROOT.glob("*.md"))


def rows() -> list[list[str]]:
    """Cells of the table, without its head."""
    found = _ROW.findall((RESULTS / "README.md").read_text())
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found[1:]]


def folders() -> set[str]:
    return {path.name for path in RESULTS.iterdir() if path.is_dir()}


def test_every_folder_is_listed_and_every_listed_one_exists() -> None:
    listed = {name for _, folder, *_ in rows() for name in _FOLDER.findall(folder)}
    assert folders() == listed
    assert all(_FOLDER.fullmatch(name) for name in folders())


def test_every_row_says_what_how_and_when() -> None:
    for row in rows():
        assert len(row) == 5 and all(row), row
        _, folder, command, _, _ = row
        (name,) = set(_FOLDER.findall(folder))
        assert re.search(r"`(python -m benchmarks\.\w+|bagua bench \w+|python examples/\w+\.py|make gpu)", command), row
        for file in re.findall(r"`(\w+\.json)`", folder):
            assert (RESULTS / name / file).is_file(), f"{name}/{file}"


def test_commands_of_the_table_exist() -> None:
    commands = " ".join(row[2] for row in rows())
    for module in re.findall(r"python -m (benchmarks[\w.]*)", commands):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    for script in re.findall(r"python (examples/\S+\.py)", commands):
        assert (ROOT / script).is_file(), script


def test_a_figure_is_kept_once() -> None:
    assert [str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.png")] == []


@pytest.mark.docs
def test_pages_cite_results_that_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: benchmarks/results/{cited}"
        for path in CITING
        for cited in _PATH.findall(path.read_text())
        if not (RESULTS / cited).exists()
    ]
    assert missing == []


@pytest.mark.docs
@pytest.mark.parametrize("page", sorted(RESULTS.rglob("README.md")), ids=lambda page: page.parent.name)
def test_links_and_names_in_notes_exist(page: Path) -> None:
    text = page.read_text()
    assert [link for link in _LINK.findall(text) if not (page.parent / link).exists()] == []
    assert set(_FOLDER.findall(text)) <= folders()
