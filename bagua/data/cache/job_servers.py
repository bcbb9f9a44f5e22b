"""The Redis servers of a job: one on each node, known to all ranks."""

from __future__ import annotations

import json
import os

import torch

from bagua.comm.team import Team
from bagua.data.cache.capacity import available_memory_bytes
from bagua.data.cache.interface import choose_address
from bagua.data.cache.redis_host import RedisHost
from bagua.data.cache.redis_server import RedisServer

__all__ = ["start_servers", "stop_servers"]

# Options -> servers of the job, the one of this node first. Ranks ask in the same order.
_started: dict[tuple[str | None, int | None], list[RedisHost]] = {}
_mine: list[RedisServer] = []


def start_servers(interface: str | None, capacity_bytes: int | None) -> list[RedisHost]:
    """Start a server on each node, or find those that were started with the same options.

    Collective over the job if that has more than one rank: the first rank of a node starts its server.

    Args:
        interface: what to listen on; see `choose_address`.
        capacity_bytes: of each server; None: half of the node's free memory.

    Returns:
        the server of this node, then those of the other nodes.

    Raises:
        RuntimeError: there are several ranks and no process group, or a server does not start on one of the nodes.
    """
    options = (interface, capacity_bytes)
    if options in _started:
        return _started[options]
    team = _team()
    if team is None:
        _started[options] = [_start(interface, capacity_bytes, num_nodes=1)]
        return _started[options]
    nodes = team.discover_nodes([key.decode() for key in team.all_gather_bytes("CachedDataset", team.node.encode())])
    node = next(members for members in nodes if team.rank in members)
    told: dict[str, object] = {}
    if team.rank == node[0]:
        try:
            host = _start(interface, capacity_bytes, len(nodes))
            told = {"host": host.host, "port": host.port, "password": host.password}
        except (OSError, RuntimeError, ValueError) as error:
            told = {"error": str(error)}
    replies = [json.loads(reply) for reply in team.all_gather_bytes("CachedDataset", json.dumps(told).encode())]
    problems = [f"rank {rank}: {reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
    if problems:
        raise RuntimeError(f"no redis server for the cache: {'; '.join(problems)}")
    hosts = {rank: RedisHost(r["host"], r["port"], password=r["password"]) for rank, r in enumerate(replies) if r}
    _started[options] = [hosts.pop(node[0]), *hosts.values()]
    return _started[options]


def stop_servers() -> None:
    """End the servers that this process started."""
    for server in _mine:
        server.stop()
    _mine.clear()
    _started.clear()


def _start(interface: str | None, capacity_bytes: int | None, num_nodes: int) -> RedisHost:
    address = choose_address(interface, num_nodes)
    _mine.append(RedisServer(address, capacity_bytes or available_memory_bytes() // 2))
    return _mine[-1].host


def _team() -> Team | None:
    """All ranks of the job; None if this process is alone."""
    for device in ("cpu", "cuda"):
        try:
            team = Team.of(None, torch.device(device))
            return team if team.size > 1 else None
        except RuntimeError:
            break
        except ValueError:  # a group of GPUs only
            continue
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            'no process group: call bagua.init_process_group() before a CachedDataset with backend "redis" and no '
            "hosts, so that the ranks find each other's servers"
        )
    return None
