"""TrainJobs of Kubeflow Trainer v2: fields of its schema, and commands that the launcher takes."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy.files import check_command, read_yaml

FILES = ("trainjob.yaml", "trainjob-elastic.yaml")
VERSION = "trainer.kubeflow.org/v1alpha1"
# Fields and types of trainer.kubeflow.org/v1alpha1, as far as they concern jobs like ours. Source:
# github.com/kubeflow/trainer, commit 8c0f505, manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml.
SPEC = {"runtimeRef", "activeDeadlineSeconds", "initializer", "managedBy", "runtimePatches", "suspend", "trainer"}
TRAINER = {
    "args": list,
    "command": list,
    "env": list,
    "image": str,
    "numNodes": int,
    "numProcPerNode": int,
    "resourcesPerNode": dict,
}
# What Trainer's plugin for torch sets in the container (pkg/runtime/framework/plugins/torch/torch.go): on the second
# of three nodes.
RUNTIME = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "2",
    "PET_MASTER_ADDR": "bagua-node-0-0.bagua",
    "PET_MASTER_PORT": "29400",
}


def complaints(job: dict[str, Any]) -> list[str]:
    """What the schema does not allow."""
    found = [
        f"{key}: {job.get(key)}" for key, want in (("apiVersion", VERSION), ("kind", "TrainJob")) if job[key] != want
    ]
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", job["metadata"]["name"]):
        found.append("metadata.name")
    spec = job["spec"]
    found += [f"spec.{key}" for key in sorted({"runtimeRef"} - set(spec)) + sorted(set(spec) - SPEC)]
    trainer = spec["trainer"]
    for key, value in trainer.items():
        if key not in TRAINER or not isinstance(value, TRAINER[key]):
            found.append(f"spec.trainer.{key}")
    found += [
        f"spec.trainer.command: {word!r}" for word in trainer["command"] + trainer["args"] if type(word) is not str
    ]
    found += [f"resourcesPerNode.{key}" for key in set(trainer["resourcesPerNode"]) - {"limits", "requests", "claims"}]
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_trainjob_has_fields_that_its_schema_knows(name: str) -> None:
    job = read_yaml(name)
    assert complaints(job) == []
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    reserved = {entry["name"] for entry in job["spec"]["trainer"].get("env", ())} & set(RUNTIME)
    assert not reserved, "Trainer refuses a job that sets these itself"


def set_text(job: dict[str, Any]) -> None:
    job["spec"]["trainer"]["numNodes"] = "2:3"


def set_policy(job: dict[str, Any]) -> None:
    job["spec"]["trainer"]["elasticPolicy"] = {"minNodes": 2}


def drop_runtime(job: dict[str, Any]) -> None:
    del job["spec"]["runtimeRef"]


@pytest.mark.parametrize("damage", [set_text, set_policy, drop_runtime])
def test_a_field_that_the_schema_lacks_is_found(damage: Callable[[dict[str, Any]], None]) -> None:
    job = copy.deepcopy(read_yaml("trainjob.yaml"))
    damage(job)
    assert len(complaints(job)) == 1


def command(name: str) -> list[str]:
    """Of a container: Kubernetes replaces $(NAME) by the container's variable."""
    trainer = read_yaml(name)["spec"]["trainer"]
    words = [*trainer["command"], *trainer["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda found: os.environ[found[1]], word) for word in words]


def test_the_launcher_reads_what_the_runtime_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RUNTIME.items():
        monkeypatch.setenv(name, value)
    args = check_command(command("trainjob.yaml"))
    assert (args.nnodes, str(args.node_rank), str(args.nproc_per_node)) == ("3", "1", "2")
    assert (args.master_addr, int(args.master_port)) == ("bagua-node-0-0.bagua", 29400)


def test_flags_of_the_elastic_job_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RUNTIME.items():
        monkeypatch.setenv(name, value)
    job = read_yaml("trainjob-elastic.yaml")
    args = check_command(command("trainjob-elastic.yaml"))
    assert (args.nnodes, str(args.nproc_per_node), args.rdzv_backend) == ("2:3", "2", "c10d")
    assert args.rdzv_endpoint == "bagua-node-0-0.bagua:29400" and args.rdzv_id == job["metadata"]["name"]
    assert args.max_restarts > 0 and job["spec"]["trainer"]["numNodes"] == int(args.nnodes.split(":")[1])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore")
def test_trainers_own_model_takes_the_job(name: str) -> None:
    models: Any = pytest.importorskip("kubeflow_trainer_api.models", reason="`make test-deploy` has it")
    job = read_yaml(name)
    # The model drops fields that it does not know.
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
