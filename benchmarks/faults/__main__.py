"""Faults in an emulated cluster while a training runs on: what they cost, beside systems that restart.

    python -m benchmarks.faults --json faults.json           everything: hours
    python -m benchmarks.faults --quick --json faults.json   4 to 5 minutes on an idle machine of two cores
    python -m benchmarks.faults --json faults.json --only chaos --faults 200 --algorithm bytegrad
    python -m benchmarks.faults --json chaos.json --only chaos --faults 200 --round 12 --jobs 2   go on for 2 jobs
    python -m benchmarks.faults --json faults.json --only slow --only loss   these faults, each algorithm
    python -m benchmarks.faults --json faults.json --table   print what is there

Each host is a network namespace with one rank. Ranks write down the begin and end of each step, who took part and a
digest of the weights; all that is reported is computed from these records. A step's compute is emulated by sleeping
(--step-ms), so that two cores are enough for eight hosts. Rows that the file has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bagua
from bagua.bench import results_file
from bagua.bench.machine import describe_machine, now
from bagua.lab import LabError
from benchmarks.faults import report
from benchmarks.faults.chaos import ANCHOR_PER_HOUR, chaos
from benchmarks.faults.rounds import BEFORE, Rounds
from benchmarks.faults.scenarios import SCENARIOS
from benchmarks.faults.systems import PRELOADING, SYSTEMS, Settings, algorithms, why_not
from benchmarks.faults.tour import tour

__all__ = ["main"]

PARTS = ("tour", "arrival", "peers", "chaos")
_QUICK = ("kill-rank", "kill-store", "partition-minority-10", "partition-halves-10")
_EACH = ("kill-rank", "kill-host", "kill-store", "partition-minority-10")  # of every algorithm
_MANY = ("kill-rank", "partition-minority-10", "partition-halves-10")  # on 8 hosts
_RESTARTING = tuple(name for name, each in SCENARIOS.items() if each.restarting)
_STATE_ROWS, _STATE_LINK = 65536, "500mbit"  # 8.4 MB of weights, and as much of momenta


@dataclass(frozen=True)
class Plan:
    """One job or more: the faults of a system, or a chaos run.

    Attributes:
        part: of `PARTS`.
        settings: of the job.
        faults: names of scenarios; none for a chaos run.
    """

    part: str
    settings: Settings
    faults: tuple[str, ...] = ()


def plans(args: argparse.Namespace) -> list[Plan]:
    """Return what is measured, in this order."""
    names = args.algorithm or algorithms()
    base = Settings(step_ms=args.step_ms, seed=args.seed, detect_s=args.detect_s, torchft=args.torchft)

    def of(**changes: Any) -> Settings:
        preload = args.preload and changes.get("system", base.system) in PRELOADING
        return Settings(**{**asdict(base), "preload": preload, **changes})

    first, others = names[0], _one_of_each_rule(names)[1:] if args.quick else names[1:]
    made = [Plan("tour", of(algorithm=first), _QUICK if args.quick else tuple(SCENARIOS))]
    made += [Plan("tour", of(algorithm=name), _QUICK[:1] if args.quick else _EACH) for name in others]
    if not args.quick:
        made.append(Plan("tour", of(algorithm=first, hosts=8), _MANY))
        made.append(Plan("arrival", of(algorithm=first, table=_STATE_ROWS, bandwidth=_STATE_LINK), ("kill-host",)))
    made += [Plan("peers", of(system=each), _QUICK[:1] if args.quick else _RESTARTING) for each in SYSTEMS[1:]]
    hosts = 4 if args.quick else 8
    in_chaos = names[:1] if args.quick else names
    made += [Plan("chaos", of(algorithm=name, hosts=hosts, stage_steps=args.stage_steps)) for name in in_chaos]
    if args.only is None:
        return made
    chosen = tuple(name for name in args.only if name in SCENARIOS)
    rows = [Plan("tour", of(algorithm=name), chosen) for name in names] if chosen else []
    return [each for each in made if each.part in args.only] + rows


def _one_of_each_rule(names: Sequence[str]) -> list[str]:
    """Return the first algorithm of each rule for a lost step, and of each kind of guarantee."""
    found: dict[tuple[str, str], str] = {}  # by rule and guarantee
    for name in names:
        algorithm = bagua.algorithms.get(name)
        found.setdefault((str(algorithm.lost_step), algorithm.exactness.value), name)
    return list(found.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, write JSON.

    Returns:
        0 if all rows reach their targets, 1 if not, 2 where the machine cannot emulate hosts.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to those there")
    parser.add_argument("--quick", action="store_true", help="few faults, one algorithm of each kind, 4 hosts")
    parser.add_argument(
        "--only",
        action="append",
        choices=(*PARTS, *SCENARIOS),
        metavar="NAME",
        help=f"a part ({', '.join(PARTS)}) or a fault, of every algorithm; may be repeated; default: all",
    )
    parser.add_argument("--algorithm", action="append", choices=algorithms(), help="may be repeated; default: all")
    parser.add_argument("--fault", action="append", choices=list(SCENARIOS), help="of tour and peers; may be repeated")
    parser.add_argument("--faults", type=int, help="of a chaos run (12; 2 with --quick)")
    parser.add_argument("--per-hour", type=float, help=f"of a chaos run ({ANCHOR_PER_HOUR:g}; 1200 with --quick)")
    parser.add_argument("--round", type=int, metavar="FAULTS", help="of one job of a chaos run (all of them)")
    parser.add_argument(
        "--jobs", type=int, default=0, help="with --round: at most so many now, the others in later calls"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and times of faults (%(default)s)")
    parser.add_argument(
        "--stage-steps",
        type=int,
        default=200,
        metavar="N",
        help="of a chaos run: optimizers with two stages make a fifth of so many steps in the first (%(default)s)",
    )
    parser.add_argument("--step-ms", type=float, default=100.0, help="emulated compute of a step (%(default)s)")
    parser.add_argument("--detect-s", type=float, default=2.0, help="silence that counts as a loss (%(default)s)")
    parser.add_argument(
        "--preload",
        action=argparse.BooleanOptionalAction,
        help="bagua run --preload: ranks are forked from a process that has imported their modules "
        "(with --quick; otherwise not)",
    )
    parser.add_argument("--limit", type=float, default=180.0, metavar="S", help="for whatever is awaited (%(default)s)")
    parser.add_argument(
        "--torchft", default="", metavar="DIR",
        help="where torchft is: pip install --target DIR --no-deps torchft==0.2.0, and with their dependencies "
        "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http",
    )  # fmt: skip
    parser.add_argument("--table", action="store_true", help="print the tables of --json, measure nothing")
    args = parser.parse_args(argv)
    if args.table and (args.json is None or not args.json.exists()):
        parser.error("--table needs the --json of a run")
    args.preload = args.quick if args.preload is None else args.preload
    args.faults = args.faults or (2 if args.quick else 12)
    for name, least in (("per_hour", 0.0), ("round", 0)):
        value = getattr(args, name)
        if value is not None and not value > least:
            parser.error(f"--{name.replace('_', '-')}: expected more than 0, got {value}")
    args.per_hour = args.per_hour or (1200.0 if args.quick else ANCHOR_PER_HOUR)
    found: dict[str, Any] = {"rows": [], "chaos": [], "timelines": [], "not_run": []}
    found |= {"rounds": [], "losses": []} if args.round else {}
    if args.json is not None and args.json.exists():
        found |= json.loads(args.json.read_text())
    if not args.table:
        try:
            _measure(args, found)
        except LabError as error:
            print(f"benchmarks.faults: needs root or user namespaces: {error}", file=sys.stderr)
            return 2
    print(report.fault_table(found["rows"], found["not_run"]))
    print()
    print(report.chaos_table(found["chaos"]))
    missed = [m for row in found["rows"] for m in report.fault_misses(row)]
    missed += [m for row in found["chaos"] for m in report.chaos_misses(row)]
    return 1 if missed else 0


def _measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    options = {name: value for name, value in vars(args).items() if name not in ("json", "torchft", "table")}
    found.setdefault("runs", []).append({"date": now(), "machine": describe_machine(), "options": options})

    def keep() -> None:
        if args.json is not None:
            results_file.write(args.json, found)

    began, jobs = time.monotonic(), 0
    for plan in plans(args):
        settings = plan.settings
        if why := why_not(settings.system, settings.torchft):
            found["not_run"] = [each for each in found["not_run"] if each["system"] != settings.system]
            found["not_run"].append({"system": settings.system, "why": why})
            keep()
            continue
        found["not_run"] = [each for each in found["not_run"] if each["system"] != settings.system]
        mark = {"bandwidth": settings.bandwidth, "table": settings.table, "step_ms": settings.step_ms}
        mark["preload"] = settings.preload
        if not plan.faults and args.round:
            rounds = Rounds(settings, args.faults, args.round, args.per_hour, args.seed, args.limit)
            left = args.jobs - jobs
            if not args.jobs or left > 0:
                jobs += rounds.go_on(found, max(left, 0), _when, keep)
                _tell(began, rounds.row(found), report.chaos_misses)
            continue
        if not plan.faults:
            there = {"algorithm": settings.algorithm, "hosts": settings.hosts, "stage_steps": settings.stage_steps}
            there["preload"] = settings.preload
            if not _has(found["chaos"], **there, faults=args.faults):
                row, timeline = chaos(
                    settings, args.faults, args.per_hour, args.seed, args.limit, 5.0 if args.quick else 15.0
                )
                found["chaos"].append({**row, **mark, "stage_steps": settings.stage_steps, **_when()})
                found["timelines"].append(timeline)
                _tell(began, found["chaos"][-1], report.chaos_misses)
                keep()
            continue
        facts = {"system": settings.system, "algorithm": settings.label, "hosts": settings.hosts, **mark}
        wanted = [
            name
            for name in plan.faults
            if (args.fault is None or name in args.fault) and not _has(found["rows"], **facts, fault=name)
        ]
        for row in tour(settings, wanted, args.limit):
            found["rows"].append({**row, **mark, **_when()})
            _tell(began, found["rows"][-1], report.fault_misses)
        keep()


def _has(rows: Sequence[dict[str, Any]], **facts: Any) -> bool:
    return any(all({**BEFORE, **row}.get(key) == value for key, value in facts.items()) for row in rows)


def _when() -> dict[str, Any]:
    return {"date": now(), "load_1min": round(describe_machine()["load_1min"], 1)}


def _tell(began: float, row: dict[str, Any], misses: Callable[[dict[str, Any]], list[str]]) -> None:
    what = ", ".join(str(row[name]) for name in ("system", "algorithm", "hosts", "fault", "faults") if name in row)
    verdict = "; ".join(misses(row)) or "all targets reached"
    print(f"{time.monotonic() - began:5.0f} s  {what}: {verdict}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
