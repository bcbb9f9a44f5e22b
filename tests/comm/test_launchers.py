"""Ranks started by srun or mpirun find each other; a process that merely runs within an allocation stays alone."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

import bagua
from bagua.comm.launchers import first_host, started_by, torchrun_variables
from tests.ports import free_port
from tests.rank_pool import RankPool

STEP = {  # the third of five tasks on two nodes
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2,3",
    "SLURM_STEP_NODELIST": "gpu-[07-09,12],login",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}


def read(env: dict[str, str]) -> dict[str, str] | None:
    launcher = started_by(env)
    return None if launcher is None else torchrun_variables(launcher, env)


def test_a_step_of_slurm() -> None:
    found = read(STEP)
    assert found is not None
    port = int(found.pop("MASTER_PORT"))
    assert found == {
        "RANK": "2",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu-07",
    }
    assert 10000 <= port < 30000
    others = [read({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}), read({**STEP, "SLURM_STEP_ID": "1"})]
    assert [each is not None and int(each["MASTER_PORT"]) == port for each in others] == [True, False]
    given = read({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert given is not None
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.1", "1234")
    on_one_host = read({**STEP, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "5"})
    assert on_one_host is not None
    assert on_one_host["MASTER_ADDR"] == "127.0.0.1"


def test_mpirun() -> None:
    local = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert read(OPEN_MPI) == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **local}
    assert read(HYDRA) == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", **local}
    one, other = (read({**OPEN_MPI, "PMIX_NAMESPACE": name}) for name in ("prterun-a-1@1", "prterun-a-2@1"))
    assert one is not None
    assert other is not None
    assert one["MASTER_PORT"] != other["MASTER_PORT"]


@pytest.mark.parametrize(
    "env",
    [
        {},
        # the script that sbatch runs, and a shell of salloc: the allocation has several tasks
        {
            "SLURM_JOB_ID": "1",
            "SLURM_NTASKS": "4",
            "SLURM_NPROCS": "4",
            "SLURM_PROCID": "0",
            "SLURM_TASKS_PER_NODE": "4",
        },
        # a shell within the allocation, which is a step with one task
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        # mpirun with one process, in a step with several
        {**STEP, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
    ids=["nothing", "batch", "interactive", "mpirun", "mpirun within srun"],
)
def test_alone(env: dict[str, str]) -> None:
    assert read(env) is None


def test_the_innermost_launcher_counts() -> None:
    """Open MPI starts a daemon on each host by srun, and ranks inherit the environment of the daemon's step."""
    found = read({**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **OPEN_MPI})
    assert found is not None
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("1", "2", "2")
    by_plugin = read({**STEP, "PMI_RANK": "2", "PMI_SIZE": "5"})  # srun --mpi=pmi2
    assert by_plugin == read(STEP)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun of Open MPI does not tell on which host rank 0 runs"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpiexec does not tell on which host rank 0 runs; set MASTER_ADDR"),
        ({"PMI_SIZE": "2"}, "mpiexec set PMI_SIZE but not PMI_RANK in the environment"),
        ({**STEP, "SLURM_PROCID": "x"}, "SLURM_PROCID: expected a number in the environment, got 'x'"),
        ({**STEP, "SLURM_PROCID": "5"}, "SLURM_PROCID=5 is not below SLURM_STEP_NUM_TASKS=5"),
        ({**STEP, "WORLD_SIZE": "8"}, "WORLD_SIZE=8 in the environment, but srun set SLURM_STEP_NUM_TASKS=5"),
    ],
)
def test_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match="^init_process_group: ") as caught:
        read(env)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu-[007-009,012],login", "gpu-007"),
        ("a[1,3]b,c", "a1b"),
        ("rack[1-2]node[03-04]", "rack1node03"),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def of_the_world(name: str, port: int) -> tuple[int, str | None, list[tuple[int, int]]]:
    rank, size = os.environ.pop("LOCAL_RANK"), os.environ.pop("LOCAL_WORLD_SIZE")
    env = {"MASTER_PORT": str(port)}
    if name == "srun":
        env |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": size, "SLURM_NTASKS": "8"}
        env |= {"SLURM_STEP_TASKS_PER_NODE": size, "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    else:
        env |= {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size}
        env |= {"OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": size}
    os.environ.update(env)
    found = []
    for _ in range(2):  # again after its end
        bagua.init_process_group(timeout=timedelta(seconds=60))
        found.append((dist.get_rank(), dist.get_world_size()))
        bagua.destroy_process_group()
    return int(rank), os.environ.get("LOCAL_RANK"), found


@pytest.mark.parametrize("name", ["srun", "mpirun"])
def test_ranks_meet(pool: RankPool, name: str) -> None:
    for rank, local_rank, found in pool.run(2, of_the_world, name, free_port(), init=False):
        assert (local_rank, found) == (str(rank), [(rank, 2)] * 2)
