"""The batch script for SLURM: options that sbatch knows, and variables of srun that the library reads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest

from bagua.comm.launchers import started_by, torchrun_variables
from tests.deploy.files import DEPLOY, ROOT, output

SCRIPT = DEPLOY / "slurm.sh"
# Of the manual page of sbatch 22.05; some of many.
OPTIONS = {
    "account", "array", "constraint", "cpus-per-task", "dependency", "error", "exclusive", "export", "gpus-per-node",
    "gpus-per-task", "gres", "job-name", "mail-type", "mem", "mem-per-cpu", "nodes", "ntasks", "ntasks-per-node",
    "open-mode", "output", "partition", "qos", "requeue", "reservation", "signal", "switches", "time", "wait-all-nodes",
}  # fmt: skip


def options() -> dict[str, str]:
    """Of #SBATCH lines, those that are commented out too; sbatch stops reading them at the first command."""
    head = SCRIPT.read_text().split("\nset -")[0]
    return dict(re.findall(r"^##?SBATCH --([\w-]+)=(\S+)$", head, re.M))


def tasks() -> Iterator[dict[str, str]]:
    """The variables that srun 22.05 set in the tasks of two nodes, recorded from a run, for the script's numbers."""
    nodes, per_node = int(options()["nodes"]), int(options()["ntasks-per-node"])
    for task in range(nodes * per_node):
        yield {
            "SLURM_JOB_ID": "3",
            "SLURM_JOB_NODELIST": f"n[1-{nodes}]",
            "SLURM_LOCALID": str(task % per_node),
            "SLURM_NNODES": str(nodes),
            "SLURM_NODEID": str(task // per_node),
            "SLURM_NTASKS": str(nodes * per_node),
            "SLURM_PROCID": str(task),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
            "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        }


def test_options_are_sbatchs_own() -> None:
    assert set(options()) <= OPTIONS and {"nodes", "ntasks-per-node", "time", "gpus-per-node"} <= set(options())
    assert options()["gpus-per-node"] == options()["ntasks-per-node"]
    assert "#SBATCH" not in SCRIPT.read_text().split("\nset -")[1]
    assert re.fullmatch(r"\d\d:\d\d:\d\d", options()["time"])


def test_the_script_starts_an_example() -> None:
    text = SCRIPT.read_text()
    (srun,) = (line for line in text.splitlines() if line.startswith("srun "))
    (script,) = re.findall(r"\$\{1:-(\S+)\}", srun)
    assert (ROOT / script).is_file() and text.startswith("#!/bin/bash\n")


def test_ranks_find_their_place_in_the_variables_of_srun() -> None:
    found = []
    for env in tasks():
        launcher = started_by(env)
        assert launcher is not None and launcher.name == "srun"
        found.append(torchrun_variables(launcher, env))
    assert [variables["RANK"] for variables in found] == [str(rank) for rank in range(len(found))]
    assert [variables["LOCAL_RANK"] for variables in found] == ["0", "1", "0", "1"]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["MASTER_ADDR"]) for each in found} == {("4", "2", "n1")}
    assert len({variables["MASTER_PORT"] for variables in found}) == 1


def test_the_batch_script_itself_is_no_rank() -> None:
    first = next(tasks())
    assert started_by({name: value for name, value in first.items() if "STEP" not in name}) is None


@pytest.mark.process
@pytest.mark.parametrize("parser", ["bash -n", "shellcheck"])
def test_shells_take_the_script(parser: str) -> None:
    words = parser.split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    output(*words, SCRIPT)
