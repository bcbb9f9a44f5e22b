"""The command line of benchmarks that time what a step of an optimizer takes, in turns, on one thread."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bagua.bench import machine, results_file
from bagua.bench.layout import Columns

__all__ = ["run"]

Measure = Callable[[int, int, int], dict[str, list[float]]]


def run(kind: str, about: str, measure: Measure, elements: int, argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0.

    Args:
        kind: name of the module in `benchmarks`.
        about: a line on what it measures.
        measure: of elements, tensors and rounds: milliseconds in each round by contender. The first is the reference.
        elements: of all tensors by default.
        argv: command line.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{kind}", description=about)
    parser.add_argument("--elements", type=int, default=elements, help="of all tensors; default: %(default)s")
    parser.add_argument("--tensors", type=int, default=16, help="of equal size; default: 16")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds; default: 15")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    args = parser.parse_args(argv)
    for name in ("elements", "tensors", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    torch.set_num_threads(1)
    found = measure(args.elements, args.tensors, args.rounds)
    medians = {name: statistics.median(times) for name, times in found.items()}
    first = next(iter(medians.values()))
    columns = Columns(("", -32), ("ms", 9), ("of the first", 15))
    print(columns.table([[name, f"{ms:.1f}", f"{ms / first:.2f}"] for name, ms in medians.items()]))
    if args.json is not None:
        content = {"kind": kind, "date": machine.now(), "machine": machine.describe_machine(), "ms": found}
        content["settings"] = {"elements": args.elements, "tensors": args.tensors, "rounds": args.rounds}
        results_file.write(args.json, content)
    return 0
