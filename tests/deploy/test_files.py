"""Dockerfile and SkyPilot task: they are read as their programs read them, and what they name exists."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.files import DEPLOY, ROOT, check_command, output, read_yaml

PAGES = "\n".join(path.read_text() for path in [ROOT / "docs" / "deploy.md", *(ROOT / "docs" / "deploy").glob("*.md")])
# Of a task, by sky/utils/schemas.py of SkyPilot 0.14.1; some of many.
TASK = {"name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs", "secrets"}
VARIABLE = re.compile(r"\$(SKYPILOT_\w+)")
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
    "SKYPILOT_NODE_IPS": "10.0.0.1",
}
# Rules of hadolint that do not fit: the image takes today's packages, and its user has a name.
HADOLINT = ("--ignore", "DL3008", "--ignore", "DL3013", "--ignore", "DL3066")


def test_the_skypilot_task_runs_our_launcher() -> None:
    task = read_yaml("skypilot.yaml")
    assert set(task) <= TASK and task["num_nodes"] >= 2 and {*task["resources"]} <= {"infra", "accelerators"}
    assert (ROOT / task["workdir"] / "pyproject.toml").is_file()
    assert {*VARIABLE.findall(task["run"])} == {*SKYPILOT}
    line = task["run"].strip()
    assert "\n" not in line
    line = line.replace('$(echo "$SKYPILOT_NODE_IPS" | head -n1)', SKYPILOT["SKYPILOT_NODE_IPS"])
    args = check_command(shlex.split(VARIABLE.sub(lambda found: SKYPILOT[found[1]], line)))
    assert (args.nnodes, str(args.node_rank), args.nproc_per_node) == ("2", "1", "4")
    assert args.master_addr == "10.0.0.1"


@pytest.mark.process
def test_skypilot_takes_the_task() -> None:
    if shutil.which("sky", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("`make test-deploy` has SkyPilot")
    program = (
        "import json, sys, jsonschema; from sky.utils import schemas; "
        "jsonschema.validate(json.load(sys.stdin), schemas.get_task_schema())"
    )
    output(sys.executable, "-W", "ignore", "-c", program, input=json.dumps(read_yaml("skypilot.yaml")))


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, lines that go on joined."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_dockerfile_copies_and_names_what_exists() -> None:
    found = instructions()
    assert {word for word, _ in found} <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "CMD"}
    arguments = dict(rest.split("=", 1) for word, rest in found if word == "ARG")
    used = {name for _, rest in found for name in re.findall(r"\$\{(\w+)\}", rest)}
    assert used == set(arguments)
    stages = [rest.split(" AS ")[1] for word, rest in found if word == "FROM" and " AS " in rest]
    for word, rest in found:
        if word == "COPY":
            stage = re.match(r"--from=(\w+) ", rest)
            assert stage is None or stage[1] in stages
            assert stage is not None or (ROOT / rest.split()[0]).exists(), rest
    assert found[-1] == ("CMD", '["bagua", "doctor"]')
    for name, default in arguments.items():
        assert f"| `{name}` | `{default}` |" in PAGES
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    assert f"\n{arguments['EXTRAS']} = [" in extras


@pytest.mark.process
def test_hadolint_takes_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("`make test-deploy` has hadolint")
    output(hadolint, "--failure-threshold", "info", *HADOLINT, DEPLOY / "Dockerfile")


def test_the_parser_of_dockerfiles_sees_the_same_instructions() -> None:
    parser: Any = pytest.importorskip("dockerfile_parse", reason="`make test-deploy` has it")
    parsed = parser.DockerfileParser(str(DEPLOY / "Dockerfile"))
    seen = [line["instruction"] for line in parsed.structure if line["instruction"] != "COMMENT"]
    assert seen == [word for word, _ in instructions()] and parsed.is_multistage


def test_the_pages_name_the_files() -> None:
    names = {path.name for path in DEPLOY.iterdir() if path.is_file()}
    for name in names:
        assert f"deploy/{name.removesuffix('.dockerignore')}" in PAGES
    assert {*re.findall(r"(?<!/)\bdeploy/([\w.-]+\.(?:yaml|sh|py)|Dockerfile)\b", PAGES)} <= names
