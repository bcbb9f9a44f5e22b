"""Rank and world size of a process that `srun` or `mpirun` started, in the terms of torchrun's environment."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["LAUNCH", "Launcher", "environment_at_start", "signs_of_others", "started_by", "torchrun_variables"]

# What torchrun sets and `init_process_group` needs.
LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = range(10000, 30000)  # below the ports that Linux gives out by itself
_DEFAULT_PORT = "29500"  # torchrun's


class Launcher(NamedTuple):
    """Names of the variables by which a launcher tells a process its place.

    Attributes:
        job: the first of these that is set distinguishes jobs on one host, for the choice of a port.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()


_PMI = Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = Launcher(
    "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", ("SLURM_JOB_ID",)
)
# The innermost first: under SLURM, mpirun starts its daemons with srun, and ranks inherit the daemons' environment.
_LAUNCHERS = (
    Launcher(
        "mpirun of Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        "mpirun of MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _PMI,
    _SLURM,
)


def started_by(env: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process as one of several ranks, or None if it is alone.

    The number of tasks of the job step counts for SLURM, not that of the allocation (`SLURM_NTASKS`), which the batch
    script and an interactive shell have too. A process of a step with one task is alone.
    """
    for launcher in _LAUNCHERS:
        if launcher.size in env and not (launcher is _PMI and _is_from_srun(env)):
            return launcher if _number(env, launcher.size, launcher) > 1 else None
    return None


def signs_of_others(env: Mapping[str, str], at_start: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Variables by which a process that no launcher has started completely seems to be one of several.

    Args:
        env: of now.
        at_start: of when the process began. What libraries such as Lightning set later stays behind when they are done.

    Returns:
        those that leave no doubt; and those that a process which is alone may have too: such leftovers, `LOCAL_RANK=0`,
        which is set by hand for scripts that read it, the address of its job in a single task of `srun` or `mpirun`,
        and the rest of the environment of a rank that has unset the four of `LAUNCH` to run something alone.
    """
    addresses = [name for name in LAUNCH[2:] if env.get(name)]
    others = [name for name, most in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)) if _above(env, name, most)]
    others += [name for name in ("PET_NNODES",) if _above(env, name, 1)]
    several_nodes = _above(env, "NNODES", 1)
    if several_nodes and _above(env, "NODE_RANK", -1):
        others += ["NODE_RANK", "NNODES"]
    sure = [name for name in LAUNCH[:2] if name in env]
    unsure = [name for name in ("LOCAL_RANK",) if env.get(name) == "0"]
    unsure += [name for name in ("NNODES",) if several_nodes and name not in others]
    single_task = any(env.get(launcher.size) == "1" for launcher in _LAUNCHERS)
    within_torchrun = not sure and not addresses and "TORCHELASTIC_RUN_ID" in env
    for names, doubted in ((addresses, single_task), (others, within_torchrun)):
        for name in names:
            (unsure if doubted or at_start.get(name) != env[name] else sure).append(name)
    return sure, unsure


def environment_at_start() -> dict[str, str]:
    """The environment with which this process was started; that of now where the system does not tell."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in (entry.partition(b"=") for entry in entries)}


def _above(env: Mapping[str, str], name: str, bound: int) -> bool:
    """Whether the variable holds a number above `bound`; of a range as `1:4` the end counts."""
    text = env.get(name, "").rpartition(":")[2].strip()
    return text.isdecimal() and int(text) > bound


def _is_from_srun(env: Mapping[str, str]) -> bool:
    """Whether the variables of PMI come from a plug-in of srun, which gives them the numbers of its own."""
    pairs = ((_PMI.rank, _SLURM.rank), (_PMI.size, _SLURM.size))
    return all(env.get(theirs) is not None and env.get(theirs) == env.get(ours) for theirs, ours in pairs)


def torchrun_variables(launcher: Launcher, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set in this process; `MASTER_ADDR` and `MASTER_PORT` may be set already.

    Raises:
        ValueError: a variable is missing or malformed, or the address of rank 0 is unknown; names it.
    """
    rank, size = _number(env, launcher.rank, launcher), _number(env, launcher.size, launcher)
    if rank >= size:
        raise ValueError(f"init_process_group: {launcher.rank}={rank} is not below {launcher.size}={size}")
    if env.get("WORLD_SIZE", str(size)) != str(size):
        raise ValueError(
            f"init_process_group: WORLD_SIZE={env['WORLD_SIZE']} in the environment, but {launcher.name} set "
            f"{launcher.size}={size}; set RANK too, or unset WORLD_SIZE"
        )
    found = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    if launcher.local_rank in env:
        found["LOCAL_RANK"] = str(_number(env, launcher.local_rank, launcher))
    local_size = _local_size(launcher, env)
    if local_size is not None:
        found["LOCAL_WORLD_SIZE"] = str(local_size)
    found["MASTER_ADDR"] = env.get("MASTER_ADDR") or _address(launcher, env, one_host=local_size == size)
    found["MASTER_PORT"] = env.get("MASTER_PORT") or _port(launcher, env)
    return found


def _number(env: Mapping[str, str], name: str, launcher: Launcher) -> int:
    value = env.get(name)
    if value is None:
        raise ValueError(
            f"init_process_group: {launcher.name} set {launcher.size} but not {name} in the environment; set RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start with torchrun or `bagua run`"
        )
    if not re.fullmatch(r"[0-9]+", value):
        raise ValueError(f"init_process_group: {name}: expected a number in the environment, got {value!r}")
    return int(value)


def _local_size(launcher: Launcher, env: Mapping[str, str]) -> int | None:
    """Ranks on this host."""
    if launcher.local_size not in env:
        return None
    if launcher is not _SLURM:
        return _number(env, launcher.local_size, launcher)
    counts = list(_repeated(env[launcher.local_size]))
    node = env.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _repeated(text: str) -> Iterator[int]:
    """SLURM's list of numbers: `2(x3),1` is 2, 2, 2, 1."""
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(number)] * int(times or 1)


def _address(launcher: Launcher, env: Mapping[str, str], *, one_host: bool) -> str:
    """The host of rank 0."""
    if one_host:
        return "127.0.0.1"
    hosts = env.get("SLURM_STEP_NODELIST") if launcher is _SLURM else None
    if not hosts:
        raise ValueError(
            f"init_process_group: {launcher.name} does not tell on which host rank 0 runs; set MASTER_ADDR to its name "
            "or address on all ranks, or start with torchrun or `bagua run`"
        )
    return first_host(hosts)


def first_host(hosts: str) -> str:
    """The first of SLURM's list of hosts: `gpu-[007-009,12],login` gives `gpu-007`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else hosts


def _port(launcher: Launcher, env: Mapping[str, str]) -> str:
    """A port that all ranks of a job step compute alike, and another job on the same host probably not."""
    job = next((env[name] for name in launcher.job if name in env), None)
    if job is None:
        return _DEFAULT_PORT
    return str(_PORTS[zlib.crc32(f"{job}.{env.get('SLURM_STEP_ID', '')}".encode()) % len(_PORTS)])
