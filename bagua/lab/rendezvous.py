"""Rendezvous of the launchers of a job on several hosts."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence

__all__ = ["command_for", "rendezvous_environment"]


def rendezvous_environment(num_hosts: int, index: int, address: str, port: int) -> dict[str, str]:
    """For commands that are no launcher."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "NODE_RANK": str(index),
        "GROUP_RANK": str(index),
        "NNODES": str(num_hosts),
        "GROUP_WORLD_SIZE": str(num_hosts),
        "PYTHONUNBUFFERED": "1",
    }


def command_for(
    argv: Sequence[str],
    num_hosts: int,
    index: int,
    address: str,
    port: int,
    nproc_per_node: int | None = None,
    addresses: Sequence[str] = (),
) -> list[str]:
    """The command of one host: after `bagua run` or `torchrun` come the flags of the rendezvous.

    A static one; or, for `--nnodes MIN:MAX` and `--fault-tolerant`, a c10d store on host 0, which `bagua run` can move
    to the next of `addresses` when that host dies. What the command says itself is kept, and if it names a rendezvous,
    none is put in.

    Raises:
        ValueError: if `nproc_per_node` is given and the command is not a launcher.
    """
    words = [os.fspath(word) for word in argv]
    if words[:1] == ["bagua"] and shutil.which("bagua") is None:
        words[:1] = [sys.executable, "-m", "bagua.cli.main"]
    end = _launcher_end(words)
    if end is None:
        if nproc_per_node is not None:
            raise ValueError(f"nproc_per_node needs `bagua run` or `torchrun`, not {' '.join(words[:2])!r}")
        return words
    flags: list[str] = []
    script = next((at for at, word in enumerate(words) if at >= end and word.endswith(".py")), len(words))
    own = words[end:script]  # the launcher's, not the script's
    given = {word[2:].split("=")[0].replace("-", "_") for word in own if word.startswith("--")}
    if nproc_per_node is not None and "nproc_per_node" not in given:
        flags += ["--nproc-per-node", str(nproc_per_node)]
    if not given & {"standalone", "rdzv_backend", "rdzv_endpoint", "master_addr"}:
        if "nnodes" not in given:
            flags += ["--nnodes", str(num_hosts)]
        if _elastic(own) or "fault_tolerant" in given:
            moves = "torchrun" not in os.path.basename(words[0]) and "torch.distributed.run" not in words[:end]
            hosts = addresses if moves and addresses else (address,)
            endpoint = ",".join(f"{each}:{port}" for each in hosts)
            flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", f"lab{port}"]
        else:
            flags += ["--node-rank", str(index), "--master-addr", address, "--master-port", str(port)]
    return [*words[:end], *flags, *words[end:]]


def _launcher_end(words: list[str]) -> int | None:
    """Where the arguments of `bagua run`, `torchrun` or their `python -m` forms begin; None for other commands."""
    names = [os.path.basename(word) for word in words]
    if names[:1] == ["torchrun"]:
        return 1
    if names[:2] == ["bagua", "run"]:
        return 2
    if re.fullmatch(r"python[0-9.]*", names[0]):
        for at, word in enumerate(words[1:], 1):
            if word == "-m":
                module = words[at + 1] if at + 1 < len(words) else ""
                if module in ("torch.distributed.run", "bagua.distributed.run", "bagua.distributed.launch"):
                    return at + 2
                if module in ("bagua", "bagua.cli.main") and words[at + 2 : at + 3] == ["run"]:
                    return at + 3
                return None
            if not word.startswith("-"):
                return None
    return None


def _elastic(words: list[str]) -> bool:
    for at, word in enumerate(words):
        if word == "--nnodes" and at + 1 < len(words):
            return ":" in words[at + 1]
        if word.startswith("--nnodes="):
            return ":" in word
    return False
