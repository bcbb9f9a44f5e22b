"""Files in deploy/: they are read as their programs read them, and what they name exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from bagua.distributed.run import get_args_parser

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")
ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deploy.md").read_text()
# Fields that the TrainJob schema of Kubeflow Trainer, trainer.kubeflow.org/v1alpha1, knows; of `spec` the first is
# required. Source: github.com/kubeflow/trainer, manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml.
SPEC = {"runtimeRef", "activeDeadlineSeconds", "initializer", "managedBy", "runtimePatches", "suspend", "trainer"}
TRAINER = {"args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode"}
# Of a task, by sky/utils/schemas.py of SkyPilot 0.14.1; some of many.
TASK = {"name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs", "secrets"}
VARIABLE = re.compile(r"\$(SKYPILOT_\w+)")
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
    "SKYPILOT_NODE_IPS": "10.0.0.1",
}


def read(name: str) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((DEPLOY / name).read_text())
    return document


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`bagua run` takes the flags, and the script and its own flags exist."""
    assert words[:2] == ["bagua", "run"]
    args = get_args_parser().parse_args(words[2:])
    script = ROOT / args.training_script
    assert script.is_file()
    flags = [word for word in args.training_script_args if word.startswith("--")]
    assert flags and all(f'"{flag}"' in script.read_text() for flag in flags)
    return args


def test_the_trainjob_has_fields_that_its_schema_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    job = read("trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert "runtimeRef" in spec and set(spec) <= SPEC and spec["runtimeRef"]["name"] == "torch-distributed"
    trainer = spec["trainer"]
    assert set(trainer) <= TRAINER and all(isinstance(word, str) for word in trainer["command"] + trainer["args"])
    assert trainer["numNodes"] >= 2 and trainer["numProcPerNode"] >= 1
    assert {*trainer["resourcesPerNode"]} <= {"limits", "requests", "claims"}
    # What the runtime sets is where the defaults of our flags come from.
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "3", "MASTER_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("PET_MASTER_PORT", "29400")
    args = check_command([*trainer["command"], *trainer["args"]], monkeypatch)
    assert (args.nnodes, str(args.node_rank), str(args.nproc_per_node)) == ("2", "1", "3")
    assert (args.master_addr, int(args.master_port)) == ("10.0.0.1", 29400)


def test_the_skypilot_task_runs_our_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    task = read("skypilot.yaml")
    assert set(task) <= TASK and task["num_nodes"] >= 2 and {*task["resources"]} <= {"infra", "accelerators"}
    assert (ROOT / task["workdir"] / "pyproject.toml").is_file()
    assert {*VARIABLE.findall(task["run"])} == {*SKYPILOT}
    line = task["run"].strip()
    assert "\n" not in line
    line = line.replace('$(echo "$SKYPILOT_NODE_IPS" | head -n1)', SKYPILOT["SKYPILOT_NODE_IPS"])
    args = check_command(shlex.split(VARIABLE.sub(lambda found: SKYPILOT[found[1]], line)), monkeypatch)
    assert (args.nnodes, str(args.node_rank), args.nproc_per_node) == ("2", "1", "4")
    assert args.master_addr == "10.0.0.1"


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
        assert f"| `{name}` | `{default}` |" in PAGE
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    assert f"\n{arguments['EXTRAS']} = [" in extras


def test_the_page_names_the_files() -> None:
    for path in DEPLOY.iterdir():
        assert f"deploy/{path.name.removesuffix('.dockerignore')}" in PAGE
    assert {*re.findall(r"deploy/([\w.]+\w)", PAGE)} <= {path.name for path in DEPLOY.iterdir()}
