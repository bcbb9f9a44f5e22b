"""What carries exchanges between ranks on a CPU: gloo, or sockets of the library's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch

from bagua.comm.mesh import Mesh, why_no_mesh
from bagua.comm.mesh_connect import congestion_control
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team

__all__ = [
    "FAR_LANES",
    "FAR_LANES_OF_SUMS",
    "FAR_S",
    "FAST_BYTES_PER_S",
    "NEAR_LANES_OF_SUMS",
    "SMALLEST_BYTES",
    "TRANSPORTS",
    "chosen_transport",
    "goes_native",
    "lanes_over",
    "may_fall_back",
    "slow_bytes_per_s",
    "why_gloo",
    "why_hook_uses_gloo",
    "why_no_transport",
]

TRANSPORTS = ("gloo", "native")
_ENV = "BAGUA_TRANSPORT"
_log = logging.getLogger("bagua")
FAR_LANES = 8  # an exchange waits for two latencies, in which others use the link
FAR_LANES_OF_SUMS = 3  # over the native transport: more flows of bulk data fill a switch's queue together, which drops
# Nearer, one flow fills a slow link. With BBR several do not share it evenly, and in a ring each lane is as fast as the
# slower of its two directions.
NEAR_LANES_OF_SUMS = 1
_SLOW_BYTES_PER_S = 80e6  # at 1 Gbit/s more lanes were a little faster
FAST_BYTES_PER_S = 160e6  # more than 1 Gbit/s can carry
SMALLEST_BYTES = 8 * 2**20  # of a model whose broadcast tells how fast links are; less says more about its start
FAR_S = 0.004  # round-trip time, over the native transport
_FAR_OVER_GLOO_S = 0.03  # nearer, an exchange's own CPU time is what more lanes would add to


def slow_bytes_per_s(num_bytes: int) -> float:
    """Return the rate of a broadcast of so many bytes below which one flow fills the links; 0.0: it does not tell.

    Its start counts for more where few bytes follow. So the rate has to be half of that for 4 to 8 MiB, and with fewer
    it is not asked for.
    """
    return _SLOW_BYTES_PER_S * min(2 * num_bytes // SMALLEST_BYTES, 2) / 2


def chosen_transport(transport: object) -> str | None:
    """`transport`, or `BAGUA_TRANSPORT` of the environment. None: "native" if all ranks have it, else "gloo".

    Raises:
        ValueError: it is neither "gloo" nor "native"; names where it was given.
    """
    name, source = (transport, "transport") if transport is not None else (os.environ.get(_ENV) or None, _ENV)
    if name is None:
        return None
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


def why_gloo(transport: str | None, team: Team, device: torch.device, over_gloo: bool) -> str:
    """Why this rank uses gloo; "" if it uses the native transport, should all ranks do so. Without communication.

    Args:
        transport: as `chosen_transport` returns it.
        over_gloo: the module's previous engine used gloo, and a switch keeps that unless told otherwise.
    """
    if transport is not None:
        return "" if transport == "native" else "it was asked for"
    if over_gloo:
        return "the module used it before"
    return str(why_no_transport("native", team, device) or "")


def why_hook_uses_gloo(team: Team, device: torch.device) -> str:
    """As `why_gloo`, for a hook or a process group. It has no argument for it: BAGUA_TRANSPORT is a preference there.

    Raises:
        ValueError: BAGUA_TRANSPORT names no transport.
    """
    transport = chosen_transport(None)
    if transport == "native":
        transport = None
    return why_gloo(transport, team, device, over_gloo=False)


def goes_native(team: Team, over_gloo: Sequence[str]) -> bool:
    """Whether exchanges go over the native transport: the same answer on all ranks. Rank 0 logs why they do not.

    Args:
        over_gloo: by rank, what `why_gloo` returned.
    """
    if team.backend != "gloo" or team.size == 1:
        return False
    reasons = [f"rank {rank}: {reason}" for rank, reason in enumerate(over_gloo) if reason]
    if reasons and team.rank == 0:
        some = len(reasons) < team.size  # else it is what this installation or these tensors are
        _log.log(logging.INFO if some else logging.DEBUG, "gloo carries all exchanges: %s", "; ".join(reasons))
    return not reasons


def may_fall_back(transport: str | None) -> bool:
    """Whether gloo takes over if the ranks cannot be connected: nobody asked for the native transport or set it up."""
    return transport is None and congestion_control() is None


def lanes_over(team: Team, mesh: Mesh | None, round_trip_s: float, num_lanes: int) -> int:
    """Return how many lanes keep the links busy: more than `num_lanes` where latency is high. Collective.

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
    return max(num_lanes, FAR_LANES) if max(map(decode, found)) >= FAR_S else num_lanes
