"""How evenly samplers share the work of a step among ranks, how much they pad, and what it brings in a training.

Hugging Face's and lhotse's samplers take part where `transformers` and `lhotse` are installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bagua.bench import progress, results_file
from bagua.bench.layout import Columns
from bagua.bench.machine import describe_machine, now
from benchmarks.balance.contenders import CONTENDERS
from benchmarks.balance.lengths import LENGTHS, log_normal
from benchmarks.balance.measure import compare, plan_a_million, train


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balance", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--samples", type=int, default=100_000, help="of an epoch (%(default)s)")
    parser.add_argument("--budget", type=float, default=16_000, help="padded tokens of a rank and step")
    parser.add_argument("--ranks", type=int, default=8, help="that share an epoch (%(default)s)")
    parser.add_argument("--train-ranks", type=int, default=4, help="processes that train (%(default)s); 0: none")
    parser.add_argument("--train-rounds", type=int, default=2, help="of both trainings, in turns (%(default)s)")
    parser.add_argument("--train-steps", type=int, default=12, help="steps of each training")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure, print tables and write the file."""
    args = arguments(argv)
    report: dict[str, Any] = {"date": now(), "machine": describe_machine()}
    report |= {name: getattr(args, name) for name in ("samples", "budget", "ranks")}
    report["rows"] = _compare_all(args)
    report["plan_a_million_s"] = plan_a_million(log_normal(1_000_000))
    print(f"a million samples planned, seconds: {report['plan_a_million_s']}", flush=True)
    if args.train_ranks:
        report["training"] = trained = train(args.train_ranks, args.train_rounds, args.train_steps)
        rates = ", ".join(f"{kind} {rate:.0f}" for kind, rate in trained["tokens_per_s"].items())
        print(f"training on {args.train_ranks} ranks, characters per second: {rates}; ratio {trained['gain']}")
    if args.json:
        results_file.write(args.json, report)


def _compare_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    columns = Columns(
        ("lengths", -12), ("sampler", -38), ("steps", 6), ("padded", 8), ("real", 7), ("waste", 7), ("s", 7)
    )  # fmt: skip
    print(columns.head())
    for name, make in LENGTHS.items():
        lengths = make(args.samples)
        for contender in CONTENDERS:
            progress.show(f"{name}, {contender}")
            found = compare(contender, lengths, args.budget, args.ranks)
            progress.clear()
            if isinstance(found, str):
                print(f"{name:<12}{contender:<38} {found}")
                rows.append({"lengths": name, "sampler": contender, "left_out": found})
                continue
            rows.append({"lengths": name, "sampler": contender, **found})
            shares = [f"{found['padded_max_over_mean']:.3f}", f"{found['real_max_over_mean']:.3f}"]
            shares += [f"{found['padding_over_real']:.2f}", f"{found['seconds_for_all_ranks']:.2f}"]
            print(columns.row([name, contender, str(found["steps"]), *shares]), flush=True)
    return rows


if __name__ == "__main__":
    main()
