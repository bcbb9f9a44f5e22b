"""Accidents in an emulated cluster, again and again: does the elastic training go on, and what does it lose?

    python -m benchmarks.elastic --runs 20 --json elastic.json
    python -m benchmarks.elastic --runs 1 --scenario kill-host-0
    python -m benchmarks.elastic --runs 0 --json elastic.json --add more.json --table

Each run trains `examples/elastic_digits.py` on hosts of an emulated cluster (one rank each), lets one thing happen at a
step that the seed decides, and reads what every rank wrote down: which images each step used, what was committed, what
was restored. A run is good if it ends by itself, has lost at most the steps since the last commit, and if the steps
that count used every image of each epoch once (but for the repetitions at the end of an epoch that make ranks equal).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bagua.bench import progress, results_file
from benchmarks.elastic import report
from benchmarks.elastic.accidents import SCENARIOS
from benchmarks.elastic.training import run, undisturbed

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print a line for each run.

    Returns:
        0 if all runs were good.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description="Accidents in elastic training.")
    parser.add_argument("--runs", type=int, default=20, help="of each scenario (20)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the first run of each scenario (0)")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="may be repeated; default: all")
    parser.add_argument("--epochs", type=int, default=6, help="of a training; twice as many where a host returns (6)")
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="a run that takes longer hangs (300)")
    parser.add_argument("--undisturbed", type=int, default=0, metavar="N", help="so many trainings to compare with")
    parser.add_argument("--budget", type=float, default=1e9, metavar="S", help="begin no run after that time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the runs to those there, which are not repeated")
    parser.add_argument("--add", type=Path, action="append", default=[], metavar="FILE", help="runs of another --json")
    parser.add_argument("--table", action="store_true", help="sum up as a Markdown table")
    args = parser.parse_args(argv)
    done: dict[str, Any] = {"runs": [], "undisturbed": []}
    if missing := [str(path) for path in args.add if not path.exists()]:
        parser.error(f"--add: no file {', '.join(missing)}")
    for path in [args.json, *args.add]:
        if path is not None and path.exists():
            report.add(done, json.loads(path.read_text()))

    def keep() -> None:
        if args.json is not None:
            results_file.write(args.json, done)

    keep()
    have = {(each["epochs"], each["seed"]) for each in done["undisturbed"]}
    for key in itertools.product((args.epochs, 2 * args.epochs), range(args.undisturbed)):
        if key not in have:
            progress.show(f"undisturbed, {key[0]} epochs, seed {key[1]}")
            done["undisturbed"].append({"epochs": key[0], "seed": key[1], "accuracy": undisturbed(*key)})
            keep()
    bad, began = 0, time.monotonic()
    have = {(each["scenario"], each["seed"]) for each in done["runs"]}
    for seed in range(args.first_seed, args.first_seed + args.runs):
        for scenario in args.scenario or SCENARIOS:
            if (scenario, seed) in have or time.monotonic() - began > args.budget:
                continue
            progress.show(f"{scenario}, seed {seed}, {time.monotonic() - began:.0f} s so far")
            result = run(scenario, seed, epochs=args.epochs, limit_s=args.limit)
            done["runs"].append(asdict(result))
            keep()
            bad += bool(result.problems)
            progress.clear()
            print(
                f"{scenario:<13} seed {seed:>2}  step {result.step:>3}  {result.seconds:>5.1f} s  went on after "
                f"{result.recovered_s} s  lost {result.lost_steps}  repeated {result.repeated}  "
                f"accuracy {result.accuracy}  {'; '.join(result.problems) or 'good'}",
                flush=True,
            )
    progress.clear()
    print("\n".join(report.table(done, args.epochs) if args.table else report.summary(done)))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
