"""What a cached dataset costs in the first epoch and saves in later ones, beside other caches.

A sample is a tensor of 602,112 bytes that takes some 10 ms of a core to compute (the work is fixed, not the time).
All contenders run in one process behind a DataLoader without workers, batches of 10, and are compared with the
uncached loader that runs in turns with them. Peers that are not installed are named as such.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from bagua.bench import progress, results_file
from bagua.bench.layout import Columns
from bagua.bench.machine import describe_machine, now
from benchmarks.cache.contenders import CONTENDERS, missing
from benchmarks.cache.measure import hit_bytes_per_s, measure
from benchmarks.cache.workload import SAMPLE_BYTES, calibrate

TARGETS = {  # name of a contender, field, what is to be reached
    "lmdb: later epochs": ("bagua lmdb", "speedup", 20.0),
    "redis: later epochs": ("bagua redis", "speedup", 10.0),
    "lmdb: first epoch": ("bagua lmdb", "first_epoch_over_uncached", 1.02),
    "redis: first epoch": ("bagua redis", "first_epoch_over_uncached", 1.02),
}
HITS_BYTES_PER_S = 2e9
COLUMNS = Columns(
    ("", -22), ("first ms", 9), ("uncached", 10), ("ratio", 7), ("quartiles", 15), ("tail ms", 10), ("later ms", 9),
    ("speedup", 9)
)  # fmt: skip


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description=__doc__)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the results there, or print them")
    parser.add_argument("--quick", action="store_true", help="few samples: shows that it runs, measures nothing")
    parser.add_argument("--preprocess-ms", type=float, default=10.0, help="work for a sample")
    parser.add_argument("--pairs", type=int, default=8, help="first epochs of each contender")
    parser.add_argument("--samples", type=int, default=60, help="samples of an epoch")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table and write the file."""
    args = arguments(argv)
    torch.set_num_threads(1)
    pairs, samples, seconds = (2, 10, 0.2) if args.quick else (args.pairs, args.samples, 2.0)
    rounds = calibrate(args.preprocess_ms)
    report: dict[str, Any] = {
        "date": now(),
        "machine": {**describe_machine(), "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")},
        "quick": args.quick,
        "sample_bytes": SAMPLE_BYTES,
        "preprocess_rounds": rounds,
        "pairs": pairs,
        "samples": samples,
        "rows": [],
        "not_installed": {},
    }
    out = sys.stderr if args.json == "-" else sys.stdout
    print(COLUMNS.head(), file=out)
    for contender in CONTENDERS:
        lacks = missing(contender)
        if lacks:
            report["not_installed"][contender.name] = lacks
            print(f"{contender.name:<22}  {lacks}", file=out)
            continue
        progress.show(contender.name)
        row = measure(contender, CONTENDERS[0], rounds, pairs, samples)
        report["rows"].append(row)
        progress.clear()
        print(line(row), file=out, flush=True)
    report["lmdb_hit_bytes_per_s"] = {}
    if not missing(next(contender for contender in CONTENDERS if contender.name == "bagua lmdb")):
        for num_processes in (1, 2):
            rates = hit_bytes_per_s(num_processes, seconds)
            report["lmdb_hit_bytes_per_s"][str(num_processes)] = rates
            each = ", ".join(f"{rate / 1e9:.2f}" for rate in rates)
            print(f"lmdb hits, {num_processes} process(es): {each} GB/s each", file=out)
    report["targets"] = targets(report)
    for name, target in report["targets"].items():
        print(f"{name:<22} {target['value']:.3f} of {target['target']:g}: {target['reached']}", file=out)
    write(report, args.json)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    low, high = row["first_epoch_over_uncached_quartiles"]
    first = [f"{row['first_epoch_ms']:.2f}", f"{row['uncached_ms']:.2f}", f"{row['first_epoch_over_uncached']:.3f}"]
    later = [f"{row['tail_ms']:.1f}", f"{row['later_epoch_ms']:.3f}", f"{row['speedup']:.1f}"]
    return COLUMNS.row([row["name"], *first, f"{low:.3f}-{high:.3f}", *later])


def targets(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was to be reached, and what was."""
    rows = {row["name"]: row for row in report["rows"]}
    found: dict[str, dict[str, Any]] = {}
    for name, (contender, field, target) in TARGETS.items():
        if contender in rows:
            value = rows[contender][field]
            reached = value >= target if field == "speedup" else value <= target
            found[name] = {"value": value, "target": target, "reached": reached}
    rates = report["lmdb_hit_bytes_per_s"].get("1")
    if rates:
        gb = min(rates) / 1e9
        found["lmdb: GB/s of hits"] = {
            "value": gb,
            "target": HITS_BYTES_PER_S / 1e9,
            "reached": gb * 1e9 >= HITS_BYTES_PER_S,
        }
    return found


def write(report: dict[str, Any], where: str | None) -> None:
    """Print the report, write it to a file, or neither."""
    if where == "-":
        print(json.dumps(report, indent=1))
    elif where:
        results_file.write(Path(where), report)


if __name__ == "__main__":
    main()
