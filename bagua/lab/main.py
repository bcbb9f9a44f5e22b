"""`bagua lab run [options] -- COMMAND ...`: one launcher on every host of an emulated cluster."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

from bagua.lab.cluster import MODES, WIRES, Cluster
from bagua.lab.errors import LabError
from bagua.lab.events import Event, parse_event, wire_for
from bagua.lab.job import Job
from bagua.lab.link import Link, seconds
from bagua.lab.pairs import Pairs, Path, parse_pairs
from bagua.signals import end_by_exception

__all__ = ["describe", "get_args_parser", "main"]


def get_args_parser() -> ArgumentParser:
    """The options of `bagua lab`."""
    parser = ArgumentParser(prog="bagua lab", description="An emulated cluster on this machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="start a command on every host, and end all of it with it",
        description="Starts a command on every host, with the rendezvous set up for `bagua run` and `torchrun`.",
        usage="bagua lab run [options] -- COMMAND ...",
    )
    run.add_argument("--hosts", type=int, default=2, metavar="N", help="number of hosts (2)")
    run.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks on each host (the launcher's default)")
    link = run.add_argument_group("links", "of every host to the switch; without any: as fast as the machine")
    link.add_argument("--bandwidth", metavar="RATE", help="in each direction: 100mbit, 1gbit")
    link.add_argument("--latency", default="0ms", metavar="TIME", help="one way, from host to host: 2ms, 500us")
    link.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="A-B=RATE[/LATENCY]",
        help="between hosts A and B, both ways, beside the links of the hosts: 0-1=50mbit/20ms, or 0+1-2+3=50mbit for "
        "hosts that share a link; may be repeated, and B-A given for another rate back",
    )
    link.add_argument("--jitter", default="0ms", metavar="TIME", help="up to that much more, at random")
    link.add_argument("--loss", type=float, default=0.0, metavar="P", help="probability that a packet is lost")
    link.add_argument("--flow-bandwidth", metavar="RATE", help="limit of each connection")
    link.add_argument("--queue", metavar="SIZE", help="what the switch holds for a host before it drops: 2mb")
    link.add_argument(
        "--congestion", metavar="NAME", help="congestion control of the hosts' TCP, e.g. bbr (default: cubic)"
    )
    link.add_argument("--seed", type=int, default=0, help="of loss and jitter (0)")
    link.add_argument(
        "--wire",
        choices=WIRES,
        default="auto",
        help="what carries the frames: veth (no limits), tbf (a bandwidth, by the kernel), relay (everything); "
        "auto: the first that can do what is asked for",
    )
    run.add_argument("--mode", choices=MODES, default="auto", help="pacing: bandwidth only, without privileges")
    run.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="TIME:ACTION:HOST[=VALUE]",
        help="what happens to a host while the job runs, e.g. 5s:cut:1, 8s:restore:1, 3s:slow:2=0.5, 9s:kill:2, "
        "20s:start:2, 9s:kill-rank:2=1, 2s:pause:0, 4s:resume:0; may be repeated",
    )
    run.add_argument("--only", type=int, metavar="HOST", help="show the output of this host only, without its name")
    run.add_argument("--grace", type=float, default=15.0, metavar="S", help="from a host's failure to the end (15)")
    run.add_argument("--keep-going", action="store_true", help="a host's failure does not end the others (elastic)")
    run.add_argument("--timeout", type=float, metavar="S", help="end the job after that time, with exit code 124")
    run.add_argument("--report", metavar="FILE", help="write bytes and punctuality of the links as JSON")
    run.add_argument("argv", nargs="*", metavar="COMMAND", help="e.g. bagua run train.py")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command on an emulated cluster.

    Returns:
        the worst exit code of the hosts (128 + n for signal n); 2 for wrong arguments; 1 where the machine allows
        no cluster; 124 after `--timeout`; 130 after Ctrl-C, 143 after SIGTERM.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    parser = get_args_parser()
    args = parser.parse_args(words[:at])
    args.argv += words[at + 1 :]
    try:
        if not args.argv:
            raise ValueError("no COMMAND; put it after `--`")
        if args.only is not None and not 0 <= args.only < args.hosts:
            raise ValueError(f"--only must be a host from 0 to {args.hosts - 1}, not {args.only}")
        link = Link(args.bandwidth, args.latency, args.jitter, args.loss, args.flow_bandwidth, args.queue)
        pairs = parse_pairs(args.link, args.hosts)
        events = sorted((parse_event(text, args.hosts) for text in args.at), key=lambda event: event.at_s)
    except ValueError as error:
        print(f"bagua lab run: {error}", file=sys.stderr)
        return 2
    try:
        with end_by_exception():
            return _run(args, link, pairs, events)
    except (LabError, ValueError) as error:
        print(f"bagua lab run: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130


def describe(cluster: Cluster, num_ranks: int | None = None) -> str:
    """What is emulated, in one line: hosts, their links, and what carries the frames."""
    link = cluster.link
    limits = [
        f"bandwidth {link.bandwidth}" if link.bandwidth is not None else "no bandwidth limit",
        *(f"{name} {value}" for name in ("latency", "jitter") if seconds(value := getattr(link, name), name)),
        *([f"loss {link.loss:g}"] if link.loss else []),
        *([f"{link.flow_bandwidth} a connection"] if link.flow_bandwidth is not None else []),
        *([f"queue {link.queue_bytes}"] if link.queue_bytes is not None else []),
    ]
    limits += [f"{between}{_of_pair(its)}" for between, its in _each_pair(cluster.pairs, cluster.shared)]
    hosts = f"{len(cluster.hosts)} host{'s' * (len(cluster.hosts) > 1)}"
    ranks = "" if num_ranks is None else f" with {num_ranks} rank{'s' * (num_ranks > 1)} each"
    tcp = f", TCP {cluster.congestion}" if cluster.congestion else ""
    return f"{hosts}{ranks}; link of each: {', '.join(limits)}; wire {cluster.wire}{tcp}"


def _each_pair(pairs: Mapping[Path, Link], shared: Mapping[Path, Path]) -> list[tuple[str, Link]]:
    """Both ways in one where they are alike; those that share a link in one, too."""
    first = {(a, b): link for (a, b), link in pairs.items() if shared.get((a, b), (a, b)) == (a, b)}
    alike = {(a, b) for a, b in first if a < b and first[a, b] == first.get((b, a))}
    return [
        (f"{'-' if (a, b) in alike else ' to '}".join(_ends((a, b), shared)), link)
        for (a, b), link in sorted(first.items())
        if (b, a) not in alike
    ]


def _ends(path: Path, shared: Mapping[Path, Path]) -> tuple[str, str]:
    """The hosts at both ends of a link."""
    paths = [each for each, first in shared.items() if first == path] or [path]
    left, right = ("+".join(map(str, sorted({each[end] for each in paths}))) for end in (0, 1))
    return left, right


def _of_pair(link: Link) -> str:
    return f" {link.bandwidth}" + (f" {link.latency}" if seconds(link.latency, "latency") else "")


def _run(args: Namespace, link: Link, pairs: Pairs, events: list[Event]) -> int:
    wire = wire_for(events, link, args.wire)
    options = {"mode": args.mode, "wire": wire, "seed": args.seed, "congestion": args.congestion}
    with Cluster(args.hosts, link, pairs=pairs, **options) as cluster:
        job = Job(cluster, args.argv, args.nproc_per_node, only=args.only, grace_s=args.grace)
        job.say(describe(cluster, args.nproc_per_node))
        code = job.run(events, keep_going=args.keep_going, timeout_s=args.timeout)
        if args.report:
            with open(args.report, "w") as file:
                json.dump(cluster.report().as_dict(), file, indent=1)
        return code


if __name__ == "__main__":
    sys.exit(main())
