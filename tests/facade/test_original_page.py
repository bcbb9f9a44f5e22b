"""docs/original.md: what it says is here is here, what it says is gone is gone."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

import pytest

from bagua.distributed import launch, run
from bagua.script import baguarun
from bagua.sys_perf.arguments import get_args_parser
from bagua.torch_api.old_variables import OLD_VARIABLES
from benchmarks.original.runs import all_runs
from benchmarks.original.table import table

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "original.md").read_text()
CODE = re.compile(r"`([^`]+)`")
STATUS = ("same", "moved", "error", "removed")


class Row(NamedTuple):
    """Of a table below a heading."""

    heading: str
    cells: list[str]


def rows(section: str) -> list[Row]:
    """Rows of the tables in a section, without their heads."""
    part = TEXT.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    found, heading, head = [], "", True
    for line in part.splitlines():
        if line.startswith("### "):
            heading = line.removeprefix("### ").strip("`")
        if not line.startswith("|"):
            head = True
        elif head or set(line) <= set("|- "):
            head = False
        else:
            found.append(Row(heading, [cell.strip() for cell in line.strip().strip("|").split(" | ")]))
    return found


NAMES = rows("Python names")
FLAGS = rows("Flags")
VARIABLES = rows("Environment variables")


def resolve(path: str) -> object | None:
    """The object of a dotted path; None if there is none. Of an attribute that instances set, the class."""
    words = path.split(".")
    for length in range(len(words), 0, -1):
        try:
            found: object = importlib.import_module(".".join(words[:length]))
        except ImportError:
            continue
        for at, word in enumerate(words[length:], length):
            if not hasattr(found, word):
                last = at == len(words) - 1 and isinstance(found, type)
                return found if last and re.search(rf"self\.{word}\b[^=\n]*=", _source(found)) else None
            found = getattr(found, word)
        return found
    return None


def _source(cls: object) -> str:
    try:
        return inspect.getsource(cls)  # pyright: ignore[reportArgumentType]
    except (OSError, TypeError):
        return ""  # a class of torch in C++


def full(heading: str, name: str) -> str:
    """The path of a name below its module's heading."""
    return f"{heading}.{name}" if heading.split(".")[0].startswith("bagua") and " " not in heading else name


@pytest.fixture(autouse=True)
def lightning_where_needed(request: pytest.FixtureRequest) -> None:
    if "lightning" in request.node.name:
        pytest.importorskip("lightning")
    import bagua.torch_api  # noqa: F401  # puts names on torch.nn.Module


@pytest.mark.parametrize("row", NAMES, ids=lambda row: f"{row.heading}-{row.cells[1]}-{CODE.findall(row.cells[0])[0]}")
def test_names_are_where_the_page_says(row: Row) -> None:
    names, status, text = row.cells if len(row.cells) == 3 else [*row.cells, ""]
    assert status in STATUS and (text or status == "same"), row
    assert CODE.findall(names), row
    for name in CODE.findall(names):
        there = resolve(full(row.heading, name)) is not None
        assert there if status in ("same", "error") else not there, f"{name}: {status}"
    if status == "moved":
        (new, *_) = CODE.findall(text)
        assert resolve(new if new.startswith(("bagua", "lightning")) else f"bagua.{new}") is not None, text


def test_the_page_is_read() -> None:
    names = [name for row in NAMES for name in CODE.findall(row.cells[0])]
    assert len(names) > 300 and len(FLAGS) > 50 and len(VARIABLES) > 25
    assert resolve("bagua.torch_api.nothing") is None and resolve("bagua.torch_api.send") is not None


def parser_of(command: str) -> ArgumentParser:
    parsers = {
        "python -m bagua.distributed.run": lambda: run.get_args_parser("python -m bagua.distributed.run"),
        "python -m bagua.distributed.launch": launch.get_args_parser,
        "baguarun": baguarun.get_args_parser,
        "bagua_sys_perf": lambda: get_args_parser("bagua_sys_perf"),
    }
    return parsers[command]()


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: f"{row.heading}-{row.cells[0]}")
def test_flags_and_their_defaults(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PET_"):
            monkeypatch.delenv(name)
    actions = {option: action for action in parser_of(row.heading)._actions for option in action.option_strings}
    flag, _, now = row.cells
    action = actions[flag.strip("`")]
    if (literal := re.match(r"`([^`]*)`", now)) and not literal[1].startswith("BAGUA_"):
        assert str(action.default) == literal[1]
    if now.startswith("accepted, no effect"):
        assert "accepted" in (action.help or ""), action.help


def test_every_flag_of_bagua_itself_is_on_the_page() -> None:
    """torchrun's flags are those of the original, and more; so are Bagua's own: what is new is on another page."""
    from bagua.distributed.flags import add_bagua_arguments

    parser = ArgumentParser(add_help=False)
    add_bagua_arguments(parser)
    own = {action.option_strings[-1] for action in parser._actions}
    listed = {row.cells[0].strip("`") for row in FLAGS if row.heading.endswith("distributed.run")}
    new = dict.fromkeys(("--fault_tolerant", "--detect_s", "--max_wait_s"), "elastic")
    new |= {"--rank_order": "sites", "--routes": "sites", "--site": "sites", "--preload": "launching"}
    assert own - listed == set(new)
    for flag, page in new.items():
        assert flag.replace("_", "-") in (ROOT / "docs" / f"{page}.md").read_text()


@pytest.mark.parametrize("row", VARIABLES, ids=lambda row: row.cells[0])
def test_variables(row: Row) -> None:
    name, now = row.cells[0].strip("`"), row.cells[2]
    assert now.startswith("named in the log") == (name in OLD_VARIABLES)
    files = [path for path in (ROOT / "bagua").rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    read = any(f'"{name}"' in path.read_text() for path in files)
    assert read != now.startswith("removed"), now


def test_variables_that_have_no_effect_are_all_there() -> None:
    assert {*OLD_VARIABLES} <= {row.cells[0].strip("`") for row in VARIABLES}


def test_the_results_are_those_of_the_newest_run() -> None:
    newest = sorted((ROOT / "benchmarks" / "results").glob("*-original"))[-1]
    results = json.loads((newest / "original.json").read_text())
    assert table(results["rows"]) in TEXT
    assert [(row["example"], row["flags"]) for row in results["rows"]] == [(r.example, r.flags) for r in all_runs()]
    passed = sum(row["result"] == "ran" for row in results["rows"])
    assert f"{passed} of {len(results['rows'])} ran" in TEXT
