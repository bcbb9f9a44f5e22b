"""Milliseconds of one optimizer step: torch's for-loop, `foreach` and `fused=True`, and `bagua.optim.fuse` on each.

Gradients are new tensors in each step, so gathering them is part of the time. Medians; contenders take turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from bagua.bench import progress, results_file
from bagua.bench.layout import Columns
from bagua.bench.machine import describe_machine, now
from benchmarks.fused.measure import measure, ratios
from benchmarks.fused.optimizers import OPTIMIZERS
from benchmarks.fused.shapes import MODELS


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    for what, known in (("models", MODELS), ("optimizers", OPTIMIZERS)):
        words = f"of {', '.join(known)}; default: all"
        parser.add_argument(
            f"--{what}", nargs="+", choices=list(known), default=list(known), metavar="NAME", help=words
        )
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each contender (%(default)s)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="that holds the parameters; here: %(default)s")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table and write the file."""
    args = arguments(argv)
    machine, rows = describe_machine(), []
    columns = Columns(
        ("model", -14), ("optimizer", -25), ("implementation", -14), ("torch ms", 10), ("bagua ms", 10), ("ratio", 7),
        ("", 2), ("bits", 0)
    )  # fmt: skip
    print(columns.head())
    for row in measure(args.models, args.optimizers, args.rounds, args.device, progress.show):
        progress.clear()
        rows.append({**row, "torch_over_best_bagua": ratios(row)})
        for label, value in row["step_ms"].items():
            if label.startswith("bagua"):
                continue
            ours = row["step_ms"].get(f"bagua on {label}")
            beside = [f"{ours:.2f}", f"{value / ours:.2f}"] if ours else ["refused", ""]
            same = {True: "same", False: "DIFFER", None: ""}[row["bit_identical"].get(label)]
            cells = [row["model"], row["optimizer"], label, f"{value:.2f}", *beside, "", same]
            print(columns.row(cells), flush=True)
        print(f"{'':<14}torch over the fastest of Bagua's: {ratios(row)}")
    if args.json:
        report = {"date": now(), "device": args.device, "machine": machine, "rounds": args.rounds, "rows": rows}
        results_file.write(args.json, report)


if __name__ == "__main__":
    main()
