"""Tuned against everything there is: `python -m benchmarks.autotune --json out.json [--conditions ...]`.

In an emulated cluster, under each network condition: every point of the space of settings is measured, the library
tunes from its defaults, and what it found is measured side by side with the defaults and with the best points.
Results are added to the JSON file, condition by condition.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.bench import machine, results_file
from bagua.bench.conditions import Condition, parse
from bagua.bench.hosts import LabHosts, LocalHosts, rank_environment
from bagua.lab import LabError

CONDITIONS = "400mbit/0ms,400mbit/5ms,200mbit/2ms,1gbit/1ms"
_POLL_S = 0.1


def run_condition(condition: Condition, job: dict[str, Any], hosts: int, local: bool) -> dict[str, Any]:
    """All that is measured under one condition.

    Raises:
        RuntimeError: a rank failed, or they took too long.
    """
    cluster = LocalHosts(hosts) if local else LabHosts(hosts, condition)
    with tempfile.TemporaryDirectory(prefix="bagua-autotune-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        try:
            with (folder / "log.txt").open("w") as log:
                argv = [sys.executable, "-m", "benchmarks.autotune.worker", name]
                processes = cluster.start(argv, rank_environment(cluster, hosts), log)
                await_ranks(processes, folder, job["limit_s"])
            ranks = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(hosts)]
            logs = [path.read_text() for path in sorted(folder.glob("log-*.csv"))]
        finally:
            cluster.close()
    return {"condition": condition.name, **_joined(ranks), "logs": logs}


def await_ranks(processes: Sequence[subprocess.Popen[Any]], folder: Path, limit_s: float) -> None:
    """Return when all have ended well.

    Raises:
        RuntimeError: a rank failed, or they took too long.
    """
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        errors = sorted(folder.glob("error-*.json"))
        if errors or time.monotonic() > deadline:
            time.sleep(1)
            said = (
                "; ".join(json.loads(path.read_text())["error"] for path in errors)
                or f"not finished within {limit_s:.0f} s"
            )
            raise RuntimeError(said + "\n" + (folder / "log.txt").read_text()[-3000:])
        time.sleep(_POLL_S)
    if any(process.returncode for process in processes):
        raise RuntimeError("a rank failed\n" + (folder / "log.txt").read_text()[-3000:])


def _joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """From what each rank saw to what all saw: a step is over when the slowest rank is."""

    def join(pairs: list[list[list[Any]]]) -> list[dict[str, Any]]:
        return [
            {
                "settings": each[0][0],
                "steps_ms": [round(1000 * max(s), 3) for s in zip(*(e[1] for e in each), strict=True)],
            }
            for each in zip(*pairs, strict=True)
        ]

    swept = ranks[0]["surface"]
    points = join([each["surface"]["points"] for each in ranks]) if swept else []
    return {
        **({"axes": swept["axes"], "sweep_s": swept["seconds"], "surface": points} if swept else {}),
        "tuned": ranks[0]["tuned"],
        "compared": join([each["compared"] for each in ranks]),
    }


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """How the tuned settings do in the comparison side by side."""
    scores = {json.dumps(each["settings"]): statistics.median(each["steps_ms"]) for each in result["compared"]}
    default = scores[json.dumps(result["compared"][0]["settings"])]
    best = min(scores.values())
    tuned = [scores[json.dumps(each["settings"])] for each in result["tuned"]]
    return {
        "condition": result["condition"],
        "points": len(result.get("surface", ())),
        "default_ms": default,
        "best_ms": best,
        "tuned_ms": tuned,
        "over_best": [each / best - 1 for each in tuned],
        "over_default": [each / default - 1 for each in tuned],
        "num_steps": [each["num_steps"] for each in result["tuned"]],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure.

    Returns:
        0; 1 where something could not be measured; 2 for wrong arguments.
    """
    args = _parser().parse_args(argv)
    job = {
        "model": args.model,
        "algorithm": "gradient_allreduce",
        "compute_ms": args.compute_ms,
        "steps": args.steps,
        "axes": {},
        "most_points": args.points,
        "num_best": args.best,
        "num_tuned": args.tuned,
        "rounds": args.rounds,
        "search": args.search,
        "timeout_s": 120.0,
        "limit_s": args.limit_s,
    }
    content: dict[str, Any] = {"results": []}
    if args.json is not None and args.json.exists():
        content = json.loads(args.json.read_text())
    known = {} if args.surface is None else {each["condition"]: each for each in _results(args.surface)}
    chosen = [parse(word) for word in args.conditions.split(",")]
    if args.surface is not None and (lacking := [each.name for each in chosen if each.name not in known]):
        print(
            f"--surface: {args.surface} has no sweep of {', '.join(lacking)}, only {', '.join(known)}", file=sys.stderr
        )
        return 2
    code = 0
    for number, condition in enumerate(chosen, 1):
        print(f"{condition.name} ({number} of {len(chosen)})", file=sys.stderr, flush=True)
        try:
            if args.surface is not None:
                job["known"] = known[condition.name]
            result = run_condition(condition, job, args.hosts, args.local)
        except (RuntimeError, LabError, OSError) as error:
            print(f"{condition.name}: {error}", file=sys.stderr)
            code = 1
            continue
        job.pop("known", None)
        result |= {"date": machine.now(), "machine": machine.describe_machine(), "job": job, "hosts": args.hosts}
        content["results"] = [each for each in content["results"] if each["condition"] != condition.name] + [result]
        print(line(summarise(result)), flush=True)
        if args.json is not None:
            results_file.write(args.json, content, indent=None)
    return code


def _results(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["results"]


def line(row: dict[str, Any]) -> str:
    """For people."""

    def each(values: list[float], form: str) -> str:
        return " ".join(format(value, form) for value in values)

    return (
        f"{row['condition']}: {row['points']} points, "
        f"defaults {row['default_ms']:.0f} ms, best {row['best_ms']:.0f} ms, "
        f"tuned {each(row['tuned_ms'], '.0f')} ms in {each(row['num_steps'], 'd')} steps: "
        f"{each(row['over_best'], '+.1%')} of the best, {each(row['over_default'], '+.1%')} of the defaults"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autotune", description="Tuned against exhaustive.")
    parser.add_argument("--json", type=Path, help="file to which results are added")
    parser.add_argument("--conditions", default=CONDITIONS, help=f"separated by commas; default {CONDITIONS}")
    parser.add_argument("--hosts", type=int, default=4, help="one rank each; default 4")
    parser.add_argument("--model", default="layers25m/10", help="see bagua bench; default layers25m/10")
    parser.add_argument("--compute-ms", type=float, default=120.0, help="of a step; default 120")
    parser.add_argument("--steps", type=int, default=2, help="timed of each point; default 2")
    parser.add_argument("--tuned", type=int, default=2, help="how often the library tunes; default 2")
    parser.add_argument("--rounds", type=int, default=4, help="of the comparison; default 4")
    parser.add_argument("--best", type=int, default=4, help="points of the sweep that are compared; default 4")
    parser.add_argument("--points", type=int, default=10**6, help="most points measured; default all")
    parser.add_argument("--search", default="neighbours", help="of the library; default neighbours")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for a condition; default 900")
    parser.add_argument("--surface", type=Path, help="file of an earlier run whose sweep is used instead of a new one")
    parser.add_argument("--local", action="store_true", help="processes of this machine instead of a cluster")
    return parser


if __name__ == "__main__":
    sys.exit(main())
