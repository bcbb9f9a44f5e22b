"""Every option of every command says what it is for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.members import registered
from tests.examples.scripts import ROOT, load_script

COMMANDS = (
    "bagua.bench.main",
    "bagua.bench.net",
    "bagua.bench.overhead",
    "bagua.cli.doctor",
    "bagua.distributed.launch",
    "bagua.distributed.run",
    "bagua.lab.main",
    "bagua.plan.main",
    "bagua.top.main",
    "bagua.script.baguarun",
    "bagua.sys_perf.main",
)
EXAMPLES = sorted(
    str(path.relative_to(ROOT / "examples").with_suffix(""))
    for path in (ROOT / "examples").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
# All that is run by hand as `python -m benchmarks.X`; workers, which other programs start, have no options.
BENCHMARKS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if '__name__ == "__main__"' in (text := path.read_text())
    and ("ArgumentParser(" in text or path.parent.name == "benchmarks")
)


class Found(Exception):
    """Carries the parser out of a program."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def stop(self: argparse.ArgumentParser, *args: object, **kw: object) -> None:
    raise Found(self)


def parser_of(main: Callable[[list[str]], object], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    with pytest.raises(Found) as found:
        main([])
    return found.value.parser


def options(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, part in action.choices.items():
                yield from options(part, f"{path} {name}")
        else:
            yield f"{path} {'/'.join(action.option_strings) or action.dest}", action


def check(parser: argparse.ArgumentParser, name: str, internal: tuple[str, ...] = ()) -> None:
    found = list(options(parser, name))
    assert found
    for what, action in found:
        assert action.help, what
        assert (action.help is argparse.SUPPRESS) == (what.split()[-1] in internal), what
    parser.format_help()  # a stray percent sign would raise


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_has_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(parser_of(importlib.import_module(name).main, monkeypatch), name)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_option_of_a_benchmark_has_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with registered():  # some benchmarks list what is in `bagua.contrib`
        check(parser_of(importlib.import_module(name).main, monkeypatch), name, internal=("--worker", "--alone"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_option_of_an_example_has_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    if "lightning" in name:
        pytest.importorskip("lightning")
    monkeypatch.setattr(sys, "path", [*sys.path, str((ROOT / "examples" / name).parent)])
    before = set(sys.modules)
    try:
        check(parser_of(load_script(name).main, monkeypatch), name)
    finally:
        for module in set(sys.modules) - before:
            file = getattr(sys.modules[module], "__file__", None)
            if file and Path(file).is_relative_to(ROOT / "examples"):
                del sys.modules[module]
