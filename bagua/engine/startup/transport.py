"""What carries encoded rows between ranks on a CPU: gloo, or sockets of the library's own."""

from __future__ import annotations

import os

import torch

from bagua.comm.mesh import why_no_mesh
from bagua.comm.team import Team

__all__ = ["TRANSPORTS", "chosen_transport", "why_no_transport"]

TRANSPORTS = ("gloo", "native")
_ENV = "BAGUA_TRANSPORT"


def chosen_transport(transport: object) -> str:
    """`transport`, or `BAGUA_TRANSPORT` of the environment, or "gloo".

    Raises:
        ValueError: it is neither "gloo" nor "native"; names where it was given.
    """
    name, source = (transport, "transport") if transport is not None else (os.environ.get(_ENV) or "gloo", _ENV)
    if name not in TRANSPORTS:
        raise ValueError(f"{source}: expected one of {', '.join(map(repr, TRANSPORTS))}, got {name!r}")
    return str(name)


def why_no_transport(transport: str | None, team: Team, device: torch.device) -> ValueError | None:
    """Why a transport cannot be used here; None if it can. Without communication."""
    if transport != "native" or team.size == 1 or team.backend == "local":  # then nothing is sent
        return None
    if team.backend != "gloo" or device.type != "cpu":
        where = f"{device.type} tensors over {team.backend}"
        return ValueError(f'transport: "native" is for CPU tensors and groups of gloo, not for {where}')
    problem = why_no_mesh()
    return ValueError(f'transport: there is no "native" here: {problem}') if problem else None
