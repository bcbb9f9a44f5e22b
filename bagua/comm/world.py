"""Initialise and shut down `torch.distributed` for a script, with or without a launcher."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua.comm import error_file, shutdown
from bagua.comm.launchers import LAUNCH, environment_at_start, signs_of_others, started_by, torchrun_variables
from bagua.own_address import address_towards, first_address, interface_of, is_loopback, name_problem

__all__ = ["destroy_process_group", "init_process_group", "is_initialized"]

_log = logging.getLogger("bagua")
_INTERFACE = "GLOO_SOCKET_IFNAME"
_MASTER = "what MASTER_ADDR is on the last rank"
# The rendezvous store outlives destroy_process_group(): were it made anew on the same port, a fast rank could
# still reach the old server of a slow rank 0 and wait there forever.
_stores: dict[tuple[str, ...], dist.Store] = {}
_generation = 0  # groups made over the store at hand


def default_backend() -> str:
    """`cpu:gloo,cuda:nccl` where there are GPUs, else `gloo`."""
    if torch.cuda.is_available() and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def init_process_group(backend: str | None = None, **kw: Any) -> None:
    """Initialise `torch.distributed` for this process.

    It reads rank and world size from the environment that `torchrun` and `bagua run` set. If only `srun` or `mpirun`
    started the ranks, it reads theirs and sets torchrun's variables accordingly. Without a launcher the world size is
    1, but part of its environment, such as `MASTER_ADDR` alone, is an error. A second call has no effect. After
    `destroy_process_group` you can call it again.

    It also announces the end of the script to the other ranks and passes an uncaught exception to the launcher.

    Args:
        backend: as in `torch.distributed.init_process_group`. Default: `cpu:gloo,cuda:nccl` if there is a GPU, else
            `gloo`.
        **kw: further arguments of `torch.distributed.init_process_group` (`timeout`, `device_id`, `init_method`, ...).

    Raises:
        RuntimeError: the rank joins a fault-tolerant job that is running, or other hosts cannot reach this one.
        ValueError: the environment is incomplete or wrong, a name of Bagua's backend is unknown, or a second call asks
            for another backend.

    Examples:
        >>> from datetime import timedelta
        >>> bagua.init_process_group(timeout=timedelta(minutes=5))
        >>> rank = torch.distributed.get_rank()
    """
    global _generation
    if dist.is_initialized():
        if backend is not None and not _has_backend(backend):
            raise ValueError(
                f"backend: torch.distributed is already initialised with {dist.get_backend()!r}, not {backend!r}; "
                "call bagua.destroy_process_group() first"
            )
        shutdown.install()
        return
    if backend is not None:
        _check_ours(backend)
    if os.environ.get("BAGUA_ARRIVES") == "1":
        raise RuntimeError(
            "init_process_group: this rank joins a job that is running, and torch.distributed cannot add a rank to the "
            "groups of the others; a fault-tolerant script does without: bagua.distribute() needs no process group"
        )
    error_file.install()  # first, so that the launcher learns of a failure below too
    backend = backend or default_backend()
    explicit = {"init_method", "store", "rank", "world_size"} & {k for k, v in kw.items() if v is not None}
    if explicit:
        dist.init_process_group(backend, **kw)
    elif not _adopt_launcher() and _is_alone():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **kw)
    else:
        rank, world_size = _rank_and_size()
        store = _rendezvous(kw.get("timeout"))
        _generation += 1
        # The launcher's store survives a restart: a new attempt must not find the old one's addresses. Any other store
        # is made for the attempt, and launchers count restarts each for itself: on several hosts the numbers differ.
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if shared else "0"
        prefix = dist.PrefixStore(f"bagua/{attempt}/{_generation}", store)
        if world_size > 1 and "gloo" in backend.lower():
            _choose_interface(prefix, rank, world_size)
        dist.init_process_group(backend, store=prefix, rank=rank, world_size=world_size, **kw)
    _await_connections()
    shutdown.install()
    _log.debug("rank %d of %d, backend %s", dist.get_rank(), dist.get_world_size(), backend)


def _adopt_launcher() -> bool:
    """Set torchrun's variables if srun or mpirun started this process as one of several ranks; whether it did."""
    launcher = started_by(os.environ) if "RANK" not in os.environ else None
    if launcher is None:
        return False
    found = torchrun_variables(launcher, os.environ)
    os.environ.update(found)
    _log.info("started by %s: %s", launcher.name, ", ".join(f"{name}={value}" for name, value in found.items()))
    return True


def _is_alone() -> bool:
    """Whether no launcher has started this process; warns if it looks as if one had.

    Raises:
        ValueError: part of a launcher's environment is missing; names it.
    """
    sure, unsure = signs_of_others(os.environ, environment_at_start())
    missing = [name for name in LAUNCH if name not in os.environ]
    if sure and missing:
        found = dict.fromkeys(name for name in (*LAUNCH, *sure, *unsure) if name in os.environ)
        raise ValueError(
            f"init_process_group: {', '.join(missing)} not set in the environment, which has {', '.join(found)}; "
            "launch with torchrun or `bagua run`, or unset all of them to run alone"
        )
    if not sure and unsure:
        _log.warning(
            "init_process_group: the environment has %s, but neither RANK nor WORLD_SIZE: this process trains alone. "
            "If others were started with it, launch them with torchrun or `bagua run`",
            ", ".join(f"{name}={os.environ[name]}" for name in unsure),
        )
    return not sure


def _rank_and_size() -> tuple[int, int]:
    """Of the environment; refuses those with which ranks would wait for each other forever."""
    numbers: list[int] = []
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        try:
            numbers.append(int(os.environ[name]))
        except ValueError:
            raise ValueError(
                f"init_process_group: {name}={os.environ[name]!r} in the environment, expected an integer"
            ) from None
    rank, world_size, _ = numbers
    if world_size < 1:
        raise ValueError(f"init_process_group: WORLD_SIZE={world_size} in the environment, expected 1 or more")
    if not 0 <= rank < world_size:
        raise ValueError(
            f"init_process_group: RANK={rank} in the environment, expected 0 to {world_size - 1}, as "
            f"WORLD_SIZE={world_size}"
        )
    return rank, world_size


def _choose_interface(store: dist.Store, rank: int, world_size: int) -> None:
    """Have gloo take the interface that leads to rank 0's host, where it would take loopback on one of several hosts.

    gloo listens at what this host's name resolves to, which installers of Debian and Ubuntu make 127.0.1.1.

    Raises:
        RuntimeError: there is no such interface; names the variable to set.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        return
    master = os.environ["MASTER_ADDR"].strip("[]")
    target = first_address(master)
    if rank == world_size - 1:  # on another host than rank 0, if there are several
        store.set(_MASTER, target or "")
    if os.environ.get(_INTERFACE) or not (problem := name_problem()):
        return
    if target is None or is_loopback(target):
        target = store.get(_MASTER).decode()
        if not target or is_loopback(target):
            return  # all are on this host
    source = address_towards(target)
    interface = None if source is None or is_loopback(source) else interface_of(source)
    if interface is None:
        raise RuntimeError(
            f"init_process_group: rank {rank}: {problem}, and no interface was found that leads to MASTER_ADDR "
            f"({target}); set {_INTERFACE} to the interface between the hosts"
        )
    os.environ[_INTERFACE] = interface
    _log.info("%s; gloo takes the interface %s, which leads to MASTER_ADDR (%s)", problem, interface, target)


def _await_connections() -> None:
    """Return when all ranks have made their connections over gloo: one that left before would break the others'."""
    if dist.get_world_size() > 1 and "cpu:gloo" in dist.get_backend_config().lower():
        group: Any = dist.group.WORLD
        group._get_backend(torch.device("cpu")).barrier().wait()


def destroy_process_group() -> None:
    """Shut down `torch.distributed` in this process. It has no effect if it is not initialised.

    Examples:
        >>> bagua.destroy_process_group()
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def is_initialized() -> bool:
    """Whether `torch.distributed` has a default process group in this process."""
    return dist.is_initialized()


def _has_backend(backend: str) -> bool:
    wanted = set(backend.lower().replace("cpu:", "").replace("cuda:", "").split(","))
    config = dist.get_backend_config().lower()
    return wanted <= set(config.replace("cpu:", "").replace("cuda:", "").split(","))


def _check_ours(backend: str) -> None:
    """torch takes an unknown name that holds a colon for a device and its backend."""
    name = backend.lower()
    if name.startswith("bagua") and name not in dist.Backend.backend_list:
        known = ", ".join(each for each in dist.Backend.backend_list if each.startswith("bagua:"))
        raise ValueError(f"backend: {backend!r} is unknown; known are bagua, {known}; bagua.Backend makes others")


def _rendezvous(timeout: timedelta | None) -> dist.Store:
    global _generation
    key = tuple(os.environ.get(name, "") for name in (*LAUNCH, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"))
    store = _stores.get(key)
    if store is None:
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        store, _, _ = next(iter(dist.rendezvous("env://", **options)))
        _stores.clear()
        _stores[key] = store
        _generation = 0  # ranks may have met in other worlds before, each in its own number of them
    return store
