"""Auto's choice beside every setting of its class: `python -m benchmarks.auto --json out.json`.

In an emulated cluster, under twelve network conditions: six that were known when the rules were written, and six that
are drawn from a seed. With `--change RATE` the link of one host changes in mid-run too: the steps up to the next choice
are counted, and the second choice is what is compared. With `--losses` two small tasks are trained under "auto", and
what they have learned is compared with DDP instead: see `benchmarks.auto.losses`.

The choice is compared with every setting of its class that learns well enough, and with DDP. First a heat of all, then
rounds in turn of those near the fastest. Results are added to the JSON file, condition by condition, and what is there
already is not measured again: a run may be made in parts, with `--only` or `--minutes`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.algorithms.auto import ALLOWED, Auto
from bagua.auto.loss_gaps import FAMILIES
from bagua.bench import machine, results_file
from bagua.bench.conditions import Condition, parse
from bagua.bench.hosts import LocalHosts, rank_environment
from bagua.lab import Cluster, LabError, Link
from benchmarks.auto import losses
from benchmarks.auto.judging import joined, line, summarise
from benchmarks.autotune.__main__ import await_ranks

KNOWN = ("50mbit/2ms", "100mbit/5ms", "250mbit/0ms", "1gbit/1ms", "1gbit/20ms", "5gbit/0ms")
_LATENCIES_MS = (0, 1, 2, 5, 10, 20)
_MBITS = (50, 5000)
_POLL_S = 0.2


class ChangingHosts:
    """Hosts of a `bagua.lab.Cluster`, one rank each, of which one gets another link."""

    def __init__(self, num_hosts: int, condition: Condition, changes: bool) -> None:
        bandwidth = None if math.isinf(condition.bits_per_s) else condition.bits_per_s
        link = Link(bandwidth=bandwidth, latency=condition.latency_s, jitter=condition.jitter_s)
        self._latency_s, self._jitter_s = condition.latency_s, condition.jitter_s
        wire = "relay" if changes else condition.wire
        self._cluster = Cluster(num_hosts, link, wire=wire, congestion=condition.congestion)
        self.address, self.interface = self._cluster.hosts[0].address, self._cluster.hosts[0].interface
        self.switches = True

    def start(self, argv: Sequence[str], env: dict[str, str], log: Any) -> list[subprocess.Popen[Any]]:
        """Start one rank on each host."""
        return [
            host.popen(argv, env={**env, "RANK": str(host.index)}, stdout=log, stderr=log)
            for host in self._cluster.hosts
        ]

    def change(self, bits_per_s: float) -> None:
        """Give host 1 another bandwidth."""
        self._cluster.hosts[1].set_link(Link(bandwidth=bits_per_s, latency=self._latency_s, jitter=self._jitter_s))

    def close(self) -> None:
        """Take the cluster down."""
        self._cluster.close()


def drawn(count: int, seed: int) -> list[str]:
    """Conditions drawn at random: bandwidths evenly on a logarithmic scale, and a latency."""
    source = random.Random(seed)
    low, high = (math.log(each) for each in _MBITS)
    return [f"{round(math.exp(source.uniform(low, high)))}mbit/{source.choice(_LATENCIES_MS)}ms" for _ in range(count)]


def run_condition(condition: Condition, job: dict[str, Any], hosts: int, local: bool) -> dict[str, Any]:
    """All that is measured under one condition.

    Raises:
        RuntimeError: a rank failed, or they took too long.
    """
    cluster: Any = LocalHosts(hosts) if local else ChangingHosts(hosts, condition, bool(job["change"]))
    with tempfile.TemporaryDirectory(prefix="bagua-auto-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        try:
            with (folder / "log.txt").open("w") as log:
                argv = [sys.executable, "-m", "benchmarks.auto.worker", name]
                processes = cluster.start(argv, rank_environment(cluster, hosts), log)
                if job["change"]:
                    _change(cluster, processes, folder, job)
                await_ranks(processes, folder, job["limit_s"])
            ranks = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(hosts)]
        finally:
            cluster.close()
    return {"condition": condition.name, **joined(ranks)}


def _change(
    cluster: ChangingHosts, processes: Sequence[subprocess.Popen[Any]], folder: Path, job: dict[str, Any]
) -> None:
    """Once the choice is made, change a link and say so."""
    deadline = time.monotonic() + job["limit_s"]
    while not (folder / "settled.json").exists():
        if time.monotonic() > deadline or any(each.poll() is not None for each in processes):
            return  # `await_ranks` says why
        time.sleep(_POLL_S)
    cluster.change(job["change"])
    results_file.write(folder / "changed.json", 0, indent=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure.

    Returns:
        0; 1 where something could not be measured; 2 for wrong arguments.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.between < 8:
        parser.error(f"--between: the time of exchanges must be known: expected at least 8 steps, got {args.between}")
    change = None if args.change is None else parse(args.change).bits_per_s
    job = {
        "model": args.model,
        "compute_ms": args.compute_ms or (10.0 if args.quick else 60.0),
        "allow": args.allow,
        "steps": 2 if args.quick else 5,
        "rounds": 1 if args.quick else 2,
        "change": change,
        **({} if change is None else {"between": args.between}),
        "timeout_s": 120.0,
        "limit_s": args.limit_s,
    }
    words = args.conditions.split(",") if args.conditions else [*KNOWN, *drawn(args.drawn, args.seed)]
    try:
        chosen = [parse(word) for word in words][: 1 if args.quick else None]
        chosen = [chosen[number - 1] for number in numbers(args.only, len(chosen))]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.losses:
        return _losses(args, chosen)
    content: dict[str, Any] = {"results": []}
    if args.json is not None and args.json.exists():
        content = json.loads(args.json.read_text())
    started, code = time.monotonic(), 0
    limit = Auto(allow=args.allow).limit(args.allow)
    for number, condition in enumerate(chosen, 1):
        key = {"condition": condition.name, "hosts": args.hosts, "job": job}
        known = next((each for each in content["results"] if _same(each, key)), None)
        if known is not None and not args.again:
            print(f"{line(known['summary'], limit)} (known)", flush=True)
            continue
        if args.minutes is not None and time.monotonic() - started >= 60 * args.minutes:
            print(f"{condition.name}: left for the next run, {args.minutes:g} minutes are over", flush=True)
            continue
        print(f"{condition.name} ({number} of {len(chosen)})", file=sys.stderr, flush=True)
        begun = time.monotonic()
        try:
            result = run_condition(condition, job, args.hosts, args.local)
        except (RuntimeError, LabError, OSError) as error:
            print(f"{condition.name}: {error}", file=sys.stderr)
            code = 1
            continue
        result |= {"date": machine.now(), "machine": machine.describe_machine(), **key}
        result |= {"seconds": round(time.monotonic() - begun, 1), "drawn": condition.name not in KNOWN}
        result["summary"] = summarise(result, args.allow)
        content["results"] = [each for each in content["results"] if not _same(each, key)] + [result]
        print(f"{line(result['summary'], limit)} ({result['seconds']:.0f} s)", flush=True)
        if args.json is not None:
            results_file.write(args.json, content, indent=None)
    return code


def _losses(args: argparse.Namespace, conditions: Sequence[Condition]) -> int:
    """Train instead of measuring times; returns the exit status."""
    try:
        settings = losses.chosen_before(args.chosen) if args.chosen is not None else {}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    job = {
        "seeds": [0] if args.quick else [0, 1, 2],
        "family": args.family,
        "allow": args.allow,
        "limit_s": args.limit_s,
        "quick": args.quick,
    }
    return losses.measure(conditions, settings, job, args.json, args.local)


def numbers(text: str | None, count: int) -> list[int]:
    """Positions, from 1, as on the command line.

    Raises:
        ValueError: names what is none.

    Examples:
        >>> from benchmarks.auto.__main__ import numbers
        >>> numbers("1,4-6", 12)
        [1, 4, 5, 6]
    """
    if text is None:
        return list(range(1, count + 1))
    found: list[int] = []
    for word in text.split(","):
        low, _, high = word.partition("-")
        if not (low.isdigit() and (high or low).isdigit() and 1 <= int(low) <= int(high or low) <= count):
            raise ValueError(f"--only: expected numbers from 1 to {count}, as 1,4-6, got {word!r}")
        found += range(int(low), int(high or low) + 1)
    return found


def _same(result: dict[str, Any], key: dict[str, Any]) -> bool:
    """Whether it was measured in the same way; the limit of time does not count."""
    return all({**result[name], "limit_s": 0} == {**key[name], "limit_s": 0} if name == "job"
               else result[name] == key[name] for name in key)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto", description="Auto beside every setting.")
    parser.add_argument("--json", type=Path, help="file to which results are added")
    parser.add_argument("--conditions", help=f"separated by commas; default {','.join(KNOWN)} and those drawn")
    parser.add_argument("--only", help="numbers of conditions, from 1, as 1,4-6; default all")
    parser.add_argument("--minutes", type=float, help="begin no condition after that time; run it again to go on")
    parser.add_argument("--again", action="store_true", help="measure what is in the file already, too")
    parser.add_argument("--drawn", type=int, default=6, help="conditions drawn at random; default 6")
    parser.add_argument("--seed", type=int, default=2026, help="of those; default 2026")
    parser.add_argument("--allow", choices=ALLOWED, default="lossy", help="class; default lossy")
    parser.add_argument("--change", help="bandwidth that host 1 gets after the choice, as 100mbit")
    parser.add_argument(
        "--between", type=int, default=24, help="steps from the choice to the change, 8 at least; default 24"
    )
    parser.add_argument("--losses", action="store_true", help="what is learned, beside DDP, instead of times")
    parser.add_argument("--chosen", type=Path, help="earlier results, whose choices are trained too, with --losses")
    parser.add_argument("--family", choices=FAMILIES, default="sgd", help="optimizer of --losses; default sgd")
    parser.add_argument("--hosts", type=int, default=4, help="one rank each; default 4")
    parser.add_argument("--model", default="layers25m/10", help="see bagua bench; default layers25m/10")
    parser.add_argument("--compute-ms", type=float, help="of a step; default 60")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for a condition; default 600")
    parser.add_argument("--quick", action="store_true", help="one condition, a short step, few of them")
    parser.add_argument("--local", action="store_true", help="processes of this machine instead of a cluster")
    return parser


if __name__ == "__main__":
    sys.exit(main())
