"""`bagua doctor --cluster`: one process on each host, started as a training is; rank 0 prints what to change."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bagua.auto.explanation import describe_rate
from bagua.auto.links import Links, measure_links
from bagua.comm.node_keys import node_key
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.doctor.clocks import Skew, measure_clocks
from bagua.doctor.findings import Finding, Site, findings, names_of
from bagua.doctor.forecast import Forecast, forecast
from bagua.doctor.host import examine_host
from bagua.errors import CommunicationError
from bagua.plan import load_model

__all__ = ["COMMAND", "main"]

COMMAND = "bagua run --nnodes N --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m bagua.doctor"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MODEL, _COMPUTE_MS, _TIMEOUT_S = "25m", 100.0, 60.0
_MOST_BYTES = 64 * 2**10  # of a host's report
_MOST_PROBLEM = 300  # characters
_END_S, _END_WITHOUT_ALL_S = 5.0, 2.0
_CPU = torch.device("cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Check this host together with all others.

    Returns:
        on all ranks 0, or 1 if training would fail; 2 for a wrong argument, or without a launcher.
    """
    args = _parser().parse_args(argv)
    try:
        load_model(args.model)
        if not (args.compute_ms >= 0 and math.isfinite(args.compute_ms)):
            raise ValueError(f"--compute-ms: expected milliseconds >= 0, got {args.compute_ms}")
        if not 0 < args.timeout < math.inf:
            raise ValueError(f"--timeout: expected seconds > 0, got {args.timeout}")
        if args.json is not None and not Path(args.json).parent.is_dir():
            raise ValueError(f"--json: {args.json}: no such directory")
        missing = [name for name in _NEEDED if not os.environ.get(name)]
        if missing:
            raise ValueError(f"--cluster: {missing[0]} is not set; start it on each host with: {COMMAND}")
        rank, size = _integer("RANK"), _integer("WORLD_SIZE")
        if not 0 <= rank < size:
            raise ValueError(f"RANK: expected 0 to {size - 1} (WORLD_SIZE {size}), got {rank}")
        port = _integer("MASTER_PORT")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"bagua doctor: {error}", file=sys.stderr)
        return 2
    try:
        return _check(args, _team(rank, size, port, args.timeout))
    except (CommunicationError, dist.DistError) as error:
        print(f"bagua doctor: rank {rank} of {size}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagua doctor --cluster",
        description="Check all hosts of a job and the links between them. Start it on each host, as a training: "
        + COMMAND,
    )
    add = parser.add_argument
    add("--cluster", action="store_true", help=argparse.SUPPRESS)
    add("--model", default=_MODEL, help='for what "auto" would choose: as `bagua plan --model` (default 25m)')
    add("--compute-ms", type=float, default=_COMPUTE_MS, help="forward and backward pass of a step (default 100)")
    add("--timeout", type=float, default=_TIMEOUT_S, metavar="S", help="how long to wait for a host (default 60)")
    add("--json", metavar="FILE", help="rank 0 writes the report there")
    return parser


def _integer(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(f"{name}: expected an integer, got {os.environ[name]!r}") from None


def _team(rank: int, size: int, port: int, timeout_s: float) -> Team:
    """All ranks, with a store that rank 0 or the launcher serves; unlike torch's rendezvous it waits for nobody."""
    limit = timedelta(seconds=2 * timeout_s)  # rank 0 begins to wait up to one time limit later
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        port,
        is_master=serves,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    store.set_timeout(limit)
    return Team(rank, size, dist.PrefixStore(f"bagua/doctor/{attempt}", store), limit, name="doctor")


def _check(args: argparse.Namespace, team: Team) -> int:
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    mine = {"node": node_key(), "facts": examine_host(os.environ["MASTER_ADDR"]) if first else None}
    payload = encode(mine)
    team.store.set(f"report/{team.rank}", payload if len(payload) <= _MOST_BYTES else b"")
    if team.rank:
        team.store.set(f"here/{team.rank}", b"1")
        missing = []
    else:
        missing = team.missing_ranks("here", args.timeout)
    missing = decode(team.broadcast_bytes("who is there", encode(missing) if team.rank == 0 else None))
    if missing:
        return _end(args, team, [], Site((), ()), [_not_there(missing, args.timeout)])
    reports = [_decoded(rank, each) for rank, each in enumerate(team.all_gather_bytes("reports of hosts", payload))]
    nodes = team.discover_nodes([each["node"] for each in reports])
    hosts = [_facts([reports[rank]["facts"] for rank in node]) for node in nodes]
    clocks, problems = _clocks(team, [node[0] for node in nodes])
    links: Links | None = None
    if team.size > 1:
        links, failed = _links(args, team, nodes, names_of(hosts))
        problems += failed
    site = Site(nodes, hosts, links, clocks)
    choices: list[Forecast] = []
    if links is not None and team.rank == 0:
        cores = min((host.get("cores") or 1) / len(node) for host, node in zip(hosts, nodes, strict=True))
        gpu = any(host.get("cuda_devices") for host in hosts)
        choices = forecast(args.model, args.compute_ms / 1e3, links, nodes, cores, gpu)
    return _end(args, team, choices, site, problems)


def _not_there(missing: Sequence[int], timeout_s: float) -> Finding:
    """Ranks that have not come, by the launcher's numbers of hosts, as their names are not known."""
    ranks = ", ".join(map(str, missing))
    per_host = os.environ.get("LOCAL_WORLD_SIZE", "")
    hosts = sorted({rank // int(per_host) for rank in missing}) if per_host.isdigit() and int(per_host) else []
    where = tuple(f"host {each}" for each in hosts) or (f"rank {ranks}",)
    what = f"no answer within {timeout_s:g} s from rank {ranks}"
    return Finding(True, what, where, "check that the same command runs there and that it reaches MASTER_ADDR")


def _clocks(team: Team, leaders: Sequence[int]) -> tuple[list[Skew], list[Finding]]:
    try:
        return measure_clocks(team, leaders), []
    except CommunicationError as error:
        what = f"clocks could not be compared: {str(error).splitlines()[0]}"
        return [], [Finding(False, what, (), "start it again")]


def _links(
    args: argparse.Namespace, team: Team, nodes: Sequence[Sequence[int]], names: Sequence[str]
) -> tuple[Links | None, list[Finding]]:
    """The links, and on rank 0 what each host says of a failure."""
    links, problem = None, ""
    try:
        links = measure_links(replace(team, timeout=timedelta(seconds=args.timeout)), nodes, _CPU)
    except CommunicationError as error:
        problem = str(error).splitlines()[0]
    # By name: ranks that failed in different places have counted different collectives.
    team.store.set(f"problem/{team.rank}", encode(problem[:_MOST_PROBLEM]))
    if team.rank:
        team.store.set(f"measured/{team.rank}", b"1")
        return links, []
    late = team.missing_ranks("measured", args.timeout + _END_S)
    said: dict[str, str] = {}
    for name, node in zip(names, nodes, strict=True):
        for rank in node:
            said[name] = said.get(name) or (
                "no answer any more" if rank in late else str(decode(team.store.get(f"problem/{rank}")))
            )
    do = "check the firewall between the hosts, and GLOO_SOCKET_IFNAME"
    failed = [Finding(True, f"links could not be measured: {each}", (name,), do) for name, each in said.items() if each]
    return (None if failed else links), failed


def _decoded(rank: int, payload: bytes) -> dict[str, Any]:
    """A rank's report. Raises if it is none: the sender may be another version."""
    try:
        if len(payload) > _MOST_BYTES:
            raise ValueError("too long")
        found = decode(payload)
        if not isinstance(found["node"], str) or not isinstance(found["facts"], dict | None):
            raise TypeError("not a report")
    except (ValueError, KeyError, TypeError) as error:
        raise CommunicationError(f"the report of rank {rank} cannot be read ({error}); is bagua the same?") from error
    return found


def _facts(reports: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any]:
    return next((each for each in reports if each is not None), {})


def _end(args: argparse.Namespace, team: Team, choices: list[Forecast], site: Site, problems: list[Finding]) -> int:
    """Rank 0 prints; all return its verdict."""
    if team.rank == 0:
        found = [*problems, *(findings(site) if site.nodes else [])]
        found.sort(key=lambda each: not each.wrong)
        for line in _lines(args, site, found, choices):
            print("".join(each if each.isprintable() else "?" for each in line), flush=True)
        if args.json is not None:
            Path(args.json).write_text(json.dumps(_report(args, site, found, choices), indent=1) + "\n")
        status = int(any(each.wrong for each in found))
        team.store.set("verdict", encode(status))
        team.missing_ranks(
            "end", _END_S if site.nodes else _END_WITHOUT_ALL_S
        )  # it serves the store: the others read the verdict first
        return status
    status = int(decode(team.store.get("verdict")))
    team.store.set(f"end/{team.rank}", b"1")
    return status


def _report(
    args: argparse.Namespace, site: Site, found: Sequence[Finding], choices: Sequence[Forecast]
) -> dict[str, Any]:
    return {
        "kind": "doctor",
        "hosts": [
            {"name": name, "ranks": list(node), **host}
            for name, node, host in zip(names_of(site.hosts), site.nodes, site.hosts, strict=True)
        ],
        "clocks": [asdict(each) for each in site.clocks],
        "links": None if site.links is None else site.links.as_dict(),
        "findings": [asdict(each) for each in found],
        "auto": {
            "model": args.model,
            "compute_ms": args.compute_ms,
            "predicted": [asdict(each) for each in choices],
        },
    }


def _lines(args: argparse.Namespace, site: Site, found: Sequence[Finding], choices: Sequence[Forecast]) -> list[str]:
    lines: list[str] = []
    names = names_of(site.hosts)
    if site.nodes:
        lines.append(f"{len(site.nodes)} host(s), {site.ranks} rank(s)")
    for place, (name, host, node) in enumerate(zip(names, site.hosts, site.nodes, strict=True)):
        versions, interface = host.get("versions", {}), host.get("interface")
        skew = site.clocks[place] if place < len(site.clocks) else None
        clock = "" if skew is None or not place else f", clock {1e3 * skew.seconds:+.0f} +- {1e3 * skew.error_s:.0f} ms"
        lines.append(
            f"  {name}: {len(node)} rank(s), {interface or 'interface unknown'} MTU "
            f"{host.get('mtu', {}).get(interface, '?')}, {host.get('tcp', {}).get('congestion_control', '?')}, "
            f"{host.get('cores', '?')} cores, {host.get('cuda_devices', 0)} GPUs, torch {versions.get('torch', '?')}, "
            f"bagua {versions.get('bagua', '?')}{clock}"
        )
    lines += _link_lines(site, names)
    lines += [str(each) for each in found] or ["nothing to change"]
    for each in choices:
        lines.append(
            f'"auto" with {each.optimizer.upper() if each.optimizer == "sgd" else "Adam"} would choose {each.chosen}: '
            f"{1e3 * each.step_s:.0f} ms a step, full precision {1e3 * each.exact_s:.0f} ms"
        )
    if choices:
        lines.append(f"(predicted, not measured: {args.model} parameters, {args.compute_ms:g} ms of compute a step)")
    return lines


def _link_lines(site: Site, names: Sequence[str]) -> list[str]:
    if site.links is None:
        return [] if site.ranks > 1 or not site.nodes else ["  one rank only: there is no link to measure"]
    of = {rank: name for node, name in zip(site.nodes, names, strict=True) for rank in node}
    lines = []
    for each in sorted(site.links.between, key=lambda link: (link.source, link.target)):
        lines.append(
            f"  {of[each.source]} -> {of[each.target]}: {describe_rate(each.bits_per_s)}, one connection "
            f"{describe_rate(each.one_flow)}, {1e3 * each.latency_s:.2f} ms one way"
        )
    for each in site.links.within:
        if each.source < each.target:
            lines.append(f"  within {of[each.source]}: {describe_rate(each.bits_per_s)}")
    return lines
