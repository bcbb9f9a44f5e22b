"""Every message, option and environment variable of the documents is in the source, and the other way round."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua.distributed.run import _torchrun_parser
from tests.cli.test_options import COMMANDS, EXAMPLES, options, parser_of
from tests.docs.markdown import DOCUMENTS, ROOT
from tests.docs.messages import OF_OTHERS, documented, is_in_the_source, pieces

# A change log tells of what is gone.
CURRENT = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
BENCHMARKS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "add_argument" in path.read_text()
)
# Options of others' programs that our documents name.
FOREIGN = {
    "--index-url": "pip",
    "--find-links": "pip",
    "--no-index": "pip",
    "--local-rank": "given to scripts by older launchers",
    "--seq-length": "of DeepSpeed's scripts",
    "--num-local-experts": "the original's moe example",
    "--save-model": "the original's examples",
    "--set-deterministic": "the original's examples",
    "--nodes": "srun",
    "--ntasks-per-node": "srun",
    "--build-arg": "docker",
    "--gpus": "docker",
    "--cpu": "accelerate launch",
    "--multi-gpu": "accelerate launch",
    "--num-processes": "accelerate launch",
    "--network": "docker",
    "--rm": "docker",
    "--shm-size": "docker",
    "--follow": "kubectl",
    "--selector": "kubectl",
    "--down": "SkyPilot",
    "--dryrun": "SkyPilot",
    "--script": "TorchX",
    "--gpu": "TorchX",
    "--test-only": "sbatch",
    "--cpus-per-task": "sbatch",
    "--gpus-per-node": "sbatch",
    "--no-kill": "sbatch",
    "--me": "squeue",
}
# Variables by which Bagua's own processes talk to each other; nobody else sets them.
INTERNAL = {
    "BAGUA_BENCH_ADDRESS",
    "BAGUA_BENCH_INTERFACE",
    "BAGUA_ELASTIC_MEMORY",
    "BAGUA_LAB_PACING_BYTES",
    "BAGUA_NET_DRIVER_LOG",
}
# Variables of the original's installation; docs/original.md says that they are gone.
GONE = {"BAGUA_NO_INSTALL_DEPS", "BAGUA_CUDA_VERSION"}
MESSAGES = [(path, message) for path in CURRENT for message in documented(path)]
VARIABLE = re.compile(r"BAGUA_[A-Z0-9_]*[A-Z0-9]")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(("path", "message"), MESSAGES, ids=lambda value: str(value)[-60:])
def test_a_documented_message_is_in_the_source(path: Path, message: str) -> None:
    found = pieces(message)
    if not found and any(words in message for words in OF_OTHERS):
        return
    assert found, f"{name_of(path)}: {message!r} has too few words of its own to be looked for"
    assert not [piece for piece in found if not is_in_the_source(piece)], f"{name_of(path)}: {message}"


def test_the_reader_of_messages_reads() -> None:
    assert len(MESSAGES) > 40
    assert all(is_in_the_source(piece) for piece in pieces("parameter 'x' has shape [a] on rank 1 and [b] on rank 0"))
    for gone in ("parameter 'x' has shape [a] on node 1", "sparse gradients were never supported", "no such message"):
        assert not all(is_in_the_source(piece) for piece in pieces(gone)), gone


def spelling(name: str) -> str:
    """Options are spelt with dashes or underscores."""
    return name.replace("_", "-")


def given_by(parser: argparse.ArgumentParser) -> Iterator[str]:
    for _, action in options(parser, ""):
        yield from (spelling(name) for name in action.option_strings if name.startswith("--"))


@pytest.fixture(scope="module")
def of_commands() -> dict[str, set[str]]:
    """The options of each command."""
    with pytest.MonkeyPatch.context() as patch:
        return {name: {*given_by(parser_of(importlib.import_module(name).main, patch))} for name in COMMANDS}


@pytest.fixture(scope="module")
def of_scripts() -> set[str]:
    """The options of examples and benchmarks."""
    found: set[str] = set()
    for name in [*map(Path, EXAMPLES)]:
        texts = [path.read_text() for path in (ROOT / "examples" / name).parent.glob("*.py")]
        found |= {spelling(option) for text in texts for option in re.findall(r'"(--[a-z][\w-]+)"', text)}
    for name in BENCHMARKS:
        text = (ROOT / (name.replace(".", "/") + ".py")).read_text()
        found |= {spelling(option) for option in re.findall(r'"(--[a-z][\w-]+)"', text)}
    return found


def test_documented_options_exist(of_commands: dict[str, set[str]], of_scripts: set[str]) -> None:
    known = {"--help", "--version", *FOREIGN, *of_scripts}.union(*of_commands.values())
    unknown = {
        f"{name_of(path)}: {option}"
        for path in CURRENT
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", path.read_text())
        if spelling(option) not in known
    }
    assert not unknown


def test_options_of_commands_are_documented(of_commands: dict[str, set[str]]) -> None:
    text = spelling("\n".join(path.read_text() for path in CURRENT))
    torchruns = {*given_by(_torchrun_parser())}  # documented by torch
    missing = {
        f"{command} {option}"
        for command, found in of_commands.items()
        for option in found - torchruns - {"--help"}
        if not re.search(rf"(?<![\w-]){option}(?![\w-])", text)
    }
    assert not missing


def variables(path: Path) -> set[str]:
    """Names of environment variables that the file reads or sets: whole strings, or getenv in C++."""
    text = path.read_text()
    if path.suffix == ".py":
        strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        return {each for each in strings if isinstance(each, str) and VARIABLE.fullmatch(each)}
    return set(re.findall(r'"(BAGUA_[A-Z0-9_]*[A-Z0-9])"', text))


def test_environment_variables_are_documented_and_exist() -> None:
    files = [p for p in (ROOT / "bagua").rglob("*") if p.suffix in (".py", ".cpp", ".h")]
    files += [ROOT / "setup.py", *(ROOT / "lightning_bagua").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    used = set().union(*map(variables, files))
    said = {name for path in CURRENT for name in VARIABLE.findall(path.read_text())}
    families = {"BAGUA_NET"}  # `BAGUA_NET_*`
    assert not said - used - families - GONE, "documented, and nothing reads them"
    assert not used - said - INTERNAL, "read, and not documented"
    assert used >= INTERNAL


def test_the_architecture_names_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().split("\n## Packages\n", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"`(\w+)`", "".join(line.split(" | ")[0] for line in page.splitlines())))
    packages = {path.parent.name for path in (ROOT / "bagua").glob("*/__init__.py")}
    assert len(packages) > 20 and packages - named == set()
    assert named - packages - {"bagua"} == set(), "packages that are gone"
