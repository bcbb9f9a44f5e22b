"""`bagua bench net`: Bagua-Net without NCCL and without a GPU, on shaped links of this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from bagua.bench import results_file
from bagua.bench.machine import describe_machine, now
from bagua.bench.net_cases import CASES, GOALS, Case, Goal, Sample
from bagua.bench.net_links import Namespaces, missing
from bagua.bench.net_report import OTHERS, markdown, of_congestion
from bagua.lab.pacing import LIBRARY as PACING
from bagua.net.driver import DriverError, Pair, run_pair

__all__ = ["add_arguments", "judge", "main", "measure"]

_TIMEOUT_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Returns:
        0; 1 if nothing could be measured; 2 for wrong arguments.
    """
    args = _parser().parse_args(argv)
    if args.table is not None:
        return _print_table(args.table)
    chosen = {case.name: case for case in CASES}
    names = [name for name in args.cases.split(",") if name] or list(chosen)
    for name in names:
        if name not in chosen:
            print(f"bagua bench net: --cases: no case {name!r}; there are {', '.join(chosen)}", file=sys.stderr)
            return 2
    if args.runs < 1 or not args.scale > 0 or not args.budget_s > 0:
        print("bagua bench net: --runs, --scale and --budget-s must be more than 0", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    if args.append and args.json is not None and args.json.exists():
        rows = json.loads(args.json.read_text())["runs"]
    report = _measure_all([chosen[name] for name in names], rows, args)
    for line in _table(report):
        print(line)
    return 0 if any("gbit_s" in row for row in rows) else 1


def _measure_all(cases: Sequence[Case], rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Add the runs to `rows`, case by case in rounds; return the report, which is written after each case."""
    congestion = args.congestion or _default_congestion()
    env = {"BAGUA_NET_CC": args.congestion} if args.congestion else {}
    end = monotonic() + args.budget_s
    report = _report(rows, congestion)
    for index in range(args.runs * len(cases)):
        if monotonic() > end:
            done = f"{index // len(cases)} of {args.runs} rounds and {index % len(cases)} cases"
            print(f"--budget-s {args.budget_s:g} is used up after {done}", flush=True)
            break
        rows += _run_case(cases[index % len(cases)], env, congestion, args.scale)
        report = _report(rows, congestion)
        if args.json is not None:
            results_file.write(args.json, report)
    return report


def _print_table(file: Path) -> int:
    try:
        report = json.loads(file.read_text())
        if not isinstance(report, dict) or report.get("kind") != "net":
            raise ValueError("not written by bagua bench net")
    except (OSError, ValueError) as error:
        print(f"bagua bench net: --table {file}: {error}", file=sys.stderr)
        return 2
    print(markdown(report, judge))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagua bench net",
        description="Bagua-Net, driven as NCCL would, on links of this machine. Shaped links need root.",
        epilog="cases: " + "; ".join(f"{case.name} ({case.what})" for case in CASES),
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="do not measure: print this file as Markdown tables")
    parser.add_argument("--append", action="store_true", help="add to the runs in FILE")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of each case, in turns; default: 1")
    parser.add_argument(
        "--budget-s", type=float, default=3600.0, metavar="S", help="no case begins after that time; default: 3600"
    )
    parser.add_argument("--cases", default="", metavar="NAMES", help="separated by commas; default: all")
    parser.add_argument("--congestion", default="", metavar="NAME", help="congestion control; default: the machine's")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="times as long; below 1: a shorter warm-up too"
    )


def _run_case(case: Case, env: Mapping[str, str], congestion: str, scale: float) -> list[dict[str, Any]]:
    rows = []
    for variant, own in case.variants.items():
        row: dict[str, Any] = {"case": case.name, "variant": variant, "congestion": congestion, "time": now()}
        reason = "" if case.socket_bytes else missing()
        if case.socket_bytes and not PACING.exists():
            reason = "the pacing library of bagua lab was not built"
        if reason:
            row["skipped"] = reason
        else:
            try:
                row.update(asdict(measure(case, {**env, **own}, scale)))
            except (DriverError, RuntimeError) as error:
                row["error"] = str(error)
        print(_line(row), flush=True)
        rows.append(row)
    return rows


def measure(case: Case, settings: Mapping[str, str], scale: float = 1.0) -> Sample:
    """Run a case once.

    Raises:
        DriverError: if the plugin reports an error or does not end.
        RuntimeError: if the link cannot be made.
    """
    env: dict[str, str] = dict(settings)
    if case.socket_bytes:
        env |= {"LD_PRELOAD": str(PACING), "BAGUA_LAB_PACING_BYTES": str(case.socket_bytes), "NCCL_SOCKET_IFNAME": "lo"}
    with nullcontext() if case.socket_bytes else Namespaces(case.shape) as namespaces:
        prefixes = ((), ()) if namespaces is None else namespaces.prefixes
        env |= {} if namespaces is None else namespaces.environment
        pair = run_pair(
            _TIMEOUT_S,
            prefixes,
            (env, env),
            mode="rate",
            channels=case.channels,
            bytes=case.message_bytes,
            seconds=case.span_s * scale,
            warmup_seconds=case.warmup_s * min(scale, 1),
        )
    return _sample(case.warmup_s * min(scale, 1), pair)


def _sample(warmup_s: float, pair: Pair) -> Sample:
    for ended in (pair.sender, pair.receiver):
        if ended.status or not ended.results:
            raise DriverError(f"{ended.results[-1:]} {ended.errors.strip()[-400:]}")
    sent, got = pair.sender.results[-1], pair.receiver.results[-1]
    bins = got["bins"][round(warmup_s / got["bin_s"]) : -1]
    channels = got["channels"]
    return Sample(
        gbit_s=8e-9 * got["bytes"] / got["span_s"],
        typical_gbit_s=8e-9 * median(bins) / got["bin_s"] if bins else 0.0,
        cpu_s_per_gb=(1e9 * sent["cpu_s"] / max(sent["bytes"], 1), 1e9 * got["cpu_s"] / max(got["bytes"], 1)),
        evenness=min(channels) / max(max(channels), 1),
        others_cpu=pair.others_cpu,
    )


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was reached of the goals, from runs that other processes did not disturb."""
    samples: dict[tuple[str, str], list[Sample]] = {}
    for row in rows:
        if "gbit_s" in row and row["others_cpu"] <= OTHERS:
            made = Sample(**{name: row[name] for name in Sample.__dataclass_fields__})
            samples.setdefault((row["case"], row["variant"]), []).append(made)
    return [_reached(goal, goal.value(samples)) for goal in GOALS]


def _reached(goal: Goal, value: float | None) -> dict[str, Any]:
    met = None if value is None else value <= goal.at_least if goal.at_most else value >= goal.at_least
    return {"goal": goal.name, "wanted": goal.at_least, "at_most": goal.at_most, "value": value, "met": met}


def _report(rows: list[dict[str, Any]], congestion: str) -> dict[str, Any]:
    machine = {**describe_machine(), "congestion_control": congestion}
    mine = of_congestion(rows, congestion, congestion)
    return {"kind": "net", "time": now(), "machine": machine, "runs": rows, "goals": judge(mine)}


def _default_congestion() -> str:
    path = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return path.read_text().strip() if path.exists() else "unknown"


def _line(row: Mapping[str, Any]) -> str:
    start = f"{row['case']:<13} {row['variant']:<16} "
    if "gbit_s" not in row:
        return start + str(row.get("skipped") or row.get("error"))
    sender, receiver = row["cpu_s_per_gb"]
    disturbed = "  not counted: others took the machine" if row["others_cpu"] > OTHERS else ""
    return (
        f"{start}{row['gbit_s']:7.2f} Gbit/s, typically {row['typical_gbit_s']:6.2f}; "
        f"CPU s/GB {sender:.2f} {receiver:.2f}; channels {row['evenness']:.2f}; "
        f"others {row['others_cpu']:.0%}{disturbed}"
    )


def _table(report: Mapping[str, Any]) -> list[str]:
    lines = ["", f"{'case':<13} {'variant':<16} runs  median    range (Gbit/s)"]
    keys = dict.fromkeys((row["case"], row["variant"]) for row in report["runs"])
    congestion = report["machine"]["congestion_control"]
    for case, variant in keys:
        found = [
            row["gbit_s"]
            for row in of_congestion(report["runs"], congestion, congestion)
            if (row["case"], row["variant"]) == (case, variant) and row.get("others_cpu", 1) <= OTHERS
        ]
        if found:
            lines.append(
                f"{case:<13} {variant:<16} {len(found):4d} {median(found):7.2f}    {min(found):.2f} to {max(found):.2f}"
            )
    lines.append("")
    for goal in report["goals"]:
        if goal["value"] is not None:
            bound = "at most" if goal["at_most"] else "at least"
            verdict = "reached" if goal["met"] else "MISSED"
            lines.append(f"{goal['goal']}: {goal['value']:.2f}, wanted {bound} {goal['wanted']}: {verdict}")
    return lines
