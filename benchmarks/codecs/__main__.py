"""Speed of the codecs: GB/s of fp32 and the ratio to a memcpy of the same size in the same process.

One thread, buffers used again: up to 10 MB then stay in the caches, 100 MB do not. For decode_mean and
decode_mean_encode the bytes of one decoded row count. Medians of pairs: a memcpy, then the operation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from bagua import codecs
from bagua.bench import progress, results_file

from .measure import measure
from .report import COLUMNS, content, line, plot, summary
from .targets import CASES


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--plot", type=Path, nargs="+", metavar="FILE", help="write a plot to these (.png, .svg)")
    parser.add_argument("--quick", action="store_true", help="1 and 10 MB only, and few repetitions")
    parser.add_argument("--mb", type=float, nargs="+", metavar="MB", help="sizes in MB of fp32 (1 10 100)")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="default: all compiled ones of this machine")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measures, prints a table and writes the files."""
    args = arguments(argv)
    sizes = args.mb or ([1, 10] if args.quick else [1, 10, 100])
    backends = args.backends or list(codecs.available_backends()[1:] or ("torch",))
    torch.set_num_threads(1)
    print(COLUMNS.head())
    rows, total = [], len(sizes) * len(CASES) * len(backends)
    for row in measure(sizes, backends, 9 if args.quick else 41):
        rows.append(row)
        progress.clear()
        print(line(row), flush=True)
        progress.show(f"{len(rows)} of {total}")
    progress.clear()
    for backend in backends:
        print(summary(rows, backend))
    if args.json:
        results_file.write(args.json, content(rows))
    if args.plot:
        plot(rows, backends, 10 if 10 in sizes else sizes[-1], args.plot)


if __name__ == "__main__":
    main()
