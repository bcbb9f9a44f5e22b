"""Milliseconds of one optimizer step: torch's for-loop, `foreach` and `fused=True`, and `bagua.optim.fuse` on each.

Gradients are new tensors in each step, so gathering them is part of the time. Medians; entrants take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from bagua.bench.machine import describe_machine, now
from benchmarks.fused.measure import measure, ratios
from benchmarks.fused.optimizers import OPTIMIZERS
from benchmarks.fused.shapes import MODELS


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each entrant")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table and write the file."""
    args = arguments(argv)
    machine, rows = describe_machine(), []
    print(f"{'model':<13} {'optimizer':<24} {'implementation':<10} {'torch ms':>9} {'bagua ms':>9} {'ratio':>6}  bits")
    for row in measure(args.models, args.optimizers, args.rounds, args.device, _say):
        rows.append({**row, "torch_over_best_bagua": ratios(row)})
        for label, value in row["step_ms"].items():
            if label.startswith("bagua"):
                continue
            ours = row["step_ms"].get(f"bagua on {label}")
            beside = f"{ours:>9.2f} {value / ours:>6.2f}" if ours else f"{'refused':>9} {'':>6}"
            same = {True: "same", False: "DIFFER", None: ""}[row["bit_identical"].get(label)]
            print(f"{row['model']:<13} {row['optimizer']:<24} {label:<10} {value:>9.2f} {beside}  {same}", flush=True)
        print(f"{'':<13} torch over the fastest of Bagua's: {ratios(row)}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"date": now(), "device": args.device, "machine": machine, "rounds": args.rounds, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def _say(what: str) -> None:
    if sys.stderr.isatty():
        print(what, end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
