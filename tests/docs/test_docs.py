"""The documents say what is so: code runs, links lead somewhere, commands and figures are right."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import bagua
from bagua.bench.main import build_parser
from tests.docs.markdown import DOCUMENTS, ROOT, anchors, blocks, links, table_after
from tests.fork_server import ForkServer
from tests.forked_process import run_forked
from tests.rank_pool import RankPool

# Records of design hold sketches of interfaces, which are not meant to run.
GUIDES = [path for path in DOCUMENTS if path.parent.name != "design"]
WITH_CODE = [path for path in GUIDES if any(block.language == "python" for block in blocks(path))]
GUIDE = ROOT / "docs" / "getting-started.md"
LAUNCHERS = (["bagua", "run"], ["torchrun"], ["python"])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def environment() -> dict[str, str]:
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**alone, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def train_py() -> str:
    return next(block.text for block in blocks(GUIDE) if block.text.startswith("# train.py"))


@pytest.fixture(scope="module")
def outcomes(fork_server: ForkServer) -> dict[str, str]:
    """What came of the Python blocks of each document, all run in one process."""
    command = [sys.executable, "-W", "error", "-m", "tests.docs.run_blocks", *map(str, WITH_CODE)]
    done = run_forked(fork_server, command, environment(), ROOT, 140)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_documents_hold_code() -> None:
    """A wrong pattern would find nothing and pass everything."""
    found = {name_of(path) for path in WITH_CODE}
    assert {"docs/algorithms.md", "docs/errors.md", "docs/getting-started.md", "docs/new-codec.md"} <= found
    assert len(found) >= 20


@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_python_blocks_run(path: Path, outcomes: dict[str, str]) -> None:
    assert not outcomes[str(path)], outcomes[str(path)]


def run_train_py() -> str:
    """On a rank: run the script; return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(train_py(), "train.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_train_py_runs_on_two_ranks(pool: RankPool) -> None:
    first, second = pool.run(2, run_train_py)
    assert "on rank 0 of 2" in first
    assert re.search(r"bytes_sent=[1-9]", first)
    assert second == ""


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{name_of(path)} links to {link}, which does not exist"
        assert target.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(target), f"{name_of(path)} links to {link}: no such heading"


def shell_lines() -> list[tuple[Path, str]]:
    texts = [(p, b.text.replace("\\\n", " ")) for p in DOCUMENTS for b in blocks(p) if b.language == "bash"]
    lines = [(p, line) for p, text in texts for line in text.splitlines() if not line.startswith("#")]
    assert lines
    return lines


@pytest.mark.parametrize(("path", "line"), shell_lines(), ids=lambda value: str(value)[:50])
def test_shell_commands_exist(path: Path, line: str) -> None:
    """Of each kind of command that the documents use, what can be checked without running it."""
    words = line.split() if line.startswith("git clone ") else shlex.split(line, comments=True)
    if words[:3] == ["bagua", "lab", "run"]:
        words = words[words.index("--") + 1 :]
    if words[0] in ("srun", "mpirun"):  # others' programs, which start a script on each rank
        words = words[words.index("python") :]
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words[1:]), line
    elif words[:2] == ["git", "clone"]:
        assert line == "git clone <this repository's URL> bagua && cd bagua"  # there is no public one
    elif words[:2] == ["pip", "install"]:
        assert [word for word in words[2:] if word[0] != "-" and "://" not in word] in (["torch"], ["."], [".[demo]"])
    elif words[:2] == ["bagua", "bench"]:
        build_parser().parse_args(words[2:])
    else:
        assert any(words[: len(launcher)] == launcher for launcher in LAUNCHERS), f"{line}: unknown command"
        if words[0] != "python":
            launcher_accepts(words)
        at = next(index for index, word in enumerate(words) if word.endswith(".py"))
        if any(block.text.startswith(f"# {words[at]}\n") for block in blocks(path)):
            return
        if words[at] == "train.py":
            assert train_py() if path == GUIDE else any(b.language == "python" for b in blocks(path)), line
        else:
            assert (ROOT / words[at]).exists(), line
        if words[at] == "examples/digits.py":
            digits_accepts(words[at + 1 :])


def launcher_accepts(words: list[str]) -> None:
    if words[0] == "bagua":
        from bagua.distributed.run import get_args_parser

        assert '"run"' in (ROOT / "bagua" / "cli" / "main.py").read_text()
        get_args_parser().parse_args(words[2:])
    else:
        from torch.distributed.run import get_args_parser as torchrun_parser

        torchrun_parser().parse_args(words[1:])


def digits_accepts(words: list[str]) -> None:
    program = (ROOT / "examples" / "digits.py").read_text()
    for word in words:
        if word.startswith("--"):
            assert f'"{word}"' in program, word
    if "--algorithm" in words:
        assert words[words.index("--algorithm") + 1] in {
            row.name for row in bagua.algorithms.available(builtin_only=True)
        }


def test_the_table_of_algorithms_is_that_of_the_code() -> None:
    expected = [
        [f"`{row.name}`", row.summary, f"{row.bytes_per_step:.2f}", row.exactness]
        for row in bagua.algorithms.available(num_elements=1, size=4, builtin_only=True)
    ]
    assert table_after(ROOT / "docs" / "algorithms.md", "## Bytes and exactness") == expected


def page_of(algorithm: str) -> Path:
    return ROOT / "docs" / "algorithms" / f"{algorithm}.md"


def test_every_algorithm_and_option_is_described() -> None:
    overview = (ROOT / "docs" / "algorithms.md").read_text()
    for row in bagua.algorithms.available(builtin_only=True):
        assert f"[{row.name}](algorithms/{row.name}.md)" in overview
        options = {cells[0] for cells in table_after(page_of(row.name), "## Options")}
        assert options == {f"`{field.name}`" for field in fields(bagua.algorithms.get(row.name))}, row.name


def test_the_bytes_on_the_pages_are_those_of_the_code() -> None:
    """Two digits, three places at most."""
    sizes = (2, 4, 8, 16)
    rows = {
        size: {row.name: row.bytes_per_step for row in bagua.algorithms.available(1, size, builtin_only=True)}
        for size in sizes
    }
    for name in rows[2]:
        (cells,) = table_after(page_of(name), "## Bytes on the wire")
        for size, cell in zip(sizes, cells[1:], strict=True):
            assert abs(float(cell) - rows[size][name]) <= 0.0051, f"{name} on {size} ranks: {rows[size][name]}"


def test_the_fields_of_the_statistics_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "statistics.md").read_text().split("\n## What a step costs\n", 1)[1].split("\n## ", 1)[0]
    for kind in (bagua.Stats, bagua.StepStats):
        names = {field.name for field in fields(kind)} | {n for n, v in vars(kind).items() if isinstance(v, property)}
        assert all(f"`{name}`" in text for name in names), names


@pytest.mark.parametrize(("page", "mark"), [("convergence", "suite, targets"), ("performance", "speed-ups")])
def test_pages_of_results_begin_with_the_short_table(page: str, mark: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    tables = re.findall(r"<!-- (.+): python -m benchmarks\.figures -->", text)
    assert tables[0] == mark
    assert text[: text.index(mark)].count("\n") < 30, "the first screen"


@pytest.mark.parametrize("path", GUIDES, ids=name_of)
def test_no_page_says_that_there_was_no_gpu(path: Path) -> None:
    """There were some: `benchmarks/results/*-gpu`."""
    assert not re.search(r"\bn(?:o GPU|one) was at hand", path.read_text())
