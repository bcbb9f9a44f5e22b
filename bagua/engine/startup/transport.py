"""What carries exchanges between ranks on a CPU: gloo, or sockets of the library's own."""

from __future__ import annotations

import os

import torch

from bagua.comm.mesh import Mesh, why_no_mesh
from bagua.comm.team import Team, decode, encode

__all__ = ["FAR_LANES", "TRANSPORTS", "chosen_transport", "lanes_over", "why_no_transport"]

TRANSPORTS = ("gloo", "native")
_ENV = "BAGUA_TRANSPORT"
FAR_LANES = 8  # an exchange waits for two latencies, in which others use the link
_FAR_S = 0.004  # there and back
_FAR_OVER_GLOO_S = 0.03  # nearer, an exchange's own CPU time is what more lanes would add to


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


def lanes_over(team: Team, mesh: Mesh | None, round_trip_s: float, num_lanes: int) -> int:
    """Return how many lanes keep the links busy: more than `num_lanes` where a rank is far away. Collective.

    Changes only which lanes carry the parts, hence no result. The same answer on all ranks.

    Args:
        mesh: of the native transport, which knows its own round trips; None: gloo.
        round_trip_s: over gloo, the same on all ranks; 0.0: unknown.

    Raises:
        CommunicationError: a rank did not arrive.
    """
    if mesh is None:
        return max(num_lanes, FAR_LANES) if round_trip_s >= _FAR_OVER_GLOO_S else num_lanes
    found = team.all_gather_bytes("round trips of the native transport", encode(mesh.round_trip_s))
    return max(num_lanes, FAR_LANES) if max(map(decode, found)) >= _FAR_S else num_lanes
