"""`bagua bench ...`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bagua.bench import (
    contenders,
    held_out,
    models,
    net,
    overhead,
    plots,
    primitives,
    results_file,
    scaling,
    tables,
    tradeoff,
    wire,
)
from bagua.bench.merge import merged, read_report, resumed
from bagua.bench.tradeoff import Plan
from bagua.lab.errors import LabError

__all__ = ["build_parser", "main"]

_EPILOG = """\
conditions: BANDWIDTH[/LATENCY][/jitterTIME][/lossSHARE][/slowSPEED][/tcpNAME][/wireNAME], e.g. 1gbit/5ms, nolimit,
  1gbit/0ms/slow0.5 (the last host at half speed), 1gbit/0ms/tcpbbr (congestion control; cubic if none is named),
  1gbit/0ms/wirerelay (how frames are carried; see docs/lab.md),
  1gbit/0-1=50mbit+20ms/0-2=200mbit (links between two hosts, rate and latency, beside those of the hosts)
contenders: {contenders}
  Options of an algorithm go behind a colon: bytegrad:bucket_bytes=1000000,average=True;next_contender
models: {models}
"""


def _add_measured(parser: argparse.ArgumentParser, quick: str) -> None:
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write figures (PNG and SVG) to this folder")
    parser.add_argument("--local", action="store_true", help="processes of this machine instead of emulated hosts")


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algorithms", metavar="NAMES", help="contenders to measure; default: all that can run here")
    parser.add_argument("--model", metavar="NAME", help="layer shapes; default: layers25m")
    parser.add_argument("--compute-ms", type=float, metavar="MS", help="forward and backward together; default: 300")
    parser.add_argument(
        "--forward-share",
        type=float,
        default=1 / 3,
        metavar="SHARE",
        help="share of the compute time that is the forward pass",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="maximum number of timed steps; default: 10")
    parser.add_argument(
        "--budget-s", type=float, metavar="S", help="time limit of the timed steps, seconds; default: 20"
    )
    parser.add_argument(
        "--again",
        type=int,
        metavar="N",
        help="repeat a contender at most N times while a virtual machine's host took over 3%% of its cores; "
        "default: 2 (0 with --quick, which has 5 minutes)",
    )
    parser.add_argument(
        "--optimizer",
        choices=("emulated", "real"),
        default="emulated",
        help="emulated: Adam-like optimizers only do the arithmetic of SGD, as if they ran on an accelerator",
    )
    parser.add_argument(
        "--profile", metavar="NAME", default="", help="record a timeline of two steps of this contender"
    )
    parser.add_argument(
        "--profile-dir", type=Path, metavar="DIR", default=Path("profile"), help="folder of the timeline"
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    epilog = _EPILOG.format(contenders=", ".join(contenders.available()), models=", ".join(models.MODELS))
    parser = argparse.ArgumentParser(
        prog="bagua bench",
        description="Measure training steps, collectives and the engine's cost.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=epilog,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": epilog}
    one = commands.add_parser("tradeoff", help="step time of every contender under every network condition", **raw)
    _add_measured(one, "few conditions, few contenders, a small model: at most 5 minutes on 2 cores")
    one.add_argument("--conditions", metavar="LIST", help=f"default: {tradeoff.FULL_CONDITIONS}")
    one.add_argument("--hosts", type=int, metavar="N", help="default: 4, with one rank each")
    one.add_argument(
        "--held-out", action="store_true", help="models, links and hosts drawn from --seed, on which nothing was tuned"
    )
    one.add_argument("--seed", type=int, metavar="N", help="of --held-out; default: 0")
    one.add_argument(
        "--memory", action="store_true", help="peak memory of a rank, too, of each contender in processes of its own"
    )
    _add_training(one)
    wan = commands.add_parser(
        "wan", help="tradeoff at latencies of 0 to 50 ms and rates of 100 Mbit/s to 1 Gbit/s", **raw
    )
    _add_measured(wan, "100 Mbit/s with 0, 20 and 50 ms, few contenders, a small model")
    wan.add_argument("--conditions", metavar="LIST", help=f"default: {tradeoff.WAN_CONDITIONS}")
    wan.add_argument("--hosts", type=int, metavar="N", help="default: 4, with one rank each")
    _add_training(wan)
    curves = commands.add_parser("curves", help="tradeoff from 50 Mbit/s to no limit, and from 0 to 50 ms", **raw)
    _add_measured(curves, "the fewest conditions of which two figures can be made, short")
    curves.add_argument("--conditions", metavar="LIST", help=f"default: {tradeoff.CURVE_CONDITIONS}")
    curves.add_argument("--hosts", type=int, metavar="N", help="default: 4, with one rank each")
    _add_training(curves)
    for each in (one, wan, curves):
        each.add_argument(
            "--resume", action="store_true", help="measure only the conditions that the file of --json has not got"
        )
    two = commands.add_parser("scaling", help="the same with 2 to 16 hosts and a model of a tenth of the size", **raw)
    _add_measured(two, "2 and 4 hosts, few contenders, short")
    two.add_argument("--conditions", metavar="LIST", help=f"default: {scaling.CONDITIONS}")
    two.add_argument("--hosts", type=_numbers, metavar="LIST", help="default: 2,4,8,16")
    _add_training(two)
    three = commands.add_parser("primitives", help="speed of collectives relative to the link", **raw)
    _add_measured(three, "two small sizes, one condition")
    three.add_argument("--conditions", metavar="LIST", help=f"default: {wire.CONDITIONS}")
    three.add_argument("--hosts", type=int, default=4, metavar="N", help="default: 4")
    three.add_argument("--sizes", type=_numbers, metavar="LIST", help="bytes; default: 16 KB to 40 MB")
    four = commands.add_parser("overhead", help="overhead of the engine on a model of 300 parameters", add_help=False)
    four.set_defaults(rest=[])
    net.add_arguments(commands.add_parser("net", help="Bagua-Net, the NCCL plugin, on shaped links, without a GPU"))
    five = commands.add_parser("report", help="a Markdown table and figures from results files")
    five.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="results written with --json; several are combined"
    )
    five.add_argument("--json", type=Path, metavar="FILE", help="write the combined results to this file")
    five.add_argument("--plots", type=Path, metavar="DIR", help="write figures (PNG and SVG) to this folder")
    five.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables to this file instead of printing them"
    )
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(int(word) for word in text.split(",") if word.strip())
    if not found or min(found) < 1:
        raise ValueError
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0; 1 if there is no result at all, or this machine cannot emulate what was asked for; 2 for wrong arguments.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["overhead"]:
        return overhead.main(words[1:])
    if words[:1] == ["net"]:
        return net.main(words[1:])
    args = build_parser().parse_args(words)
    prepare, run = _COMMANDS[args.command]
    try:
        plans = prepare(args)
    except ValueError as error:
        print(f"bagua bench {args.command}: {error}", file=sys.stderr)
        return 2
    try:
        return run(args, plans)
    except LabError as error:
        print(f"bagua bench {args.command}: {error}", file=sys.stderr)
        return 1


def _tradeoff(args: argparse.Namespace, plans: Sequence[Plan]) -> int:
    if getattr(args, "held_out", False):
        return _held_out(args, plans)
    (plan,) = plans
    for remark in tradeoff.check(plan):
        print(f"left out: {remark}")
    earlier: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = []
    if args.resume and args.json.exists():
        try:
            earlier = read_report(args.json)
            rows[:] = resumed(earlier, tradeoff.report(plan, []), args.json)["rows"]
        except ValueError as error:
            print(f"bagua bench {args.command}: {error}", file=sys.stderr)
            return 2
        there = {row["condition"] for row in rows}
        print(f"{len(there)} conditions are in {args.json}")
        plan = replace(plan, conditions=tuple(each for each in plan.conditions if each.name not in there))

    def keep(report: dict[str, Any]) -> None:
        report = report if earlier is None else resumed(earlier, report, args.json)
        rows[:] = report["rows"]
        _write(args, report)

    tradeoff.run(plan, args.profile_dir, _say, keep)
    return 0 if any(not row["error"] for row in rows) else 1


def _held_out(args: argparse.Namespace, plans: Sequence[Plan]) -> int:
    rows: list[dict[str, Any]] = []

    def keep(report: dict[str, Any]) -> None:
        rows[:] = report["rows"]
        _write(args, report)

    held_out.run(args.seed or 0, args.quick, plans, _say, keep)
    return 0 if any(not row["error"] for row in rows) else 1


def _tradeoff_plans(args: argparse.Namespace) -> list[Plan]:
    if args.resume and (args.held_out or not args.json):
        raise ValueError("--resume: only with --json, and not with --held-out")
    if not args.held_out:
        if args.seed is not None:
            raise ValueError("--seed: only with --held-out")
        return _plan(args, (args.hosts if args.hosts is not None else 4,))
    for option in ("conditions", "hosts", "model", "compute_ms", "plots", "local", "profile", "memory"):
        if getattr(args, option):
            raise ValueError(f"--{option.replace('_', '-')}: not with --held-out, which draws its conditions")
    drawn = held_out.draw(args.seed or 0, args.quick)
    names = args.algorithms or (held_out.QUICK_CONTENDERS if args.quick else held_out.CONTENDERS)
    for contender in (chosen := contenders.split_names(names)):
        contenders.get(contender)
    steps, budget_s = args.steps or (5 if args.quick else 10), args.budget_s or (3 if args.quick else 20)
    plans = held_out.plans_of(drawn, chosen, steps, budget_s, args.again or 0)
    for plan in plans:
        tradeoff.check(plan)
    return plans


def _wan_plans(args: argparse.Namespace) -> list[Plan]:
    return _slow_plans(args, tradeoff.QUICK_WAN_CONDITIONS if args.quick else tradeoff.WAN_CONDITIONS)


def _curve_plans(args: argparse.Namespace) -> list[Plan]:
    args.compute_ms = args.compute_ms or 100
    return _slow_plans(args, tradeoff.QUICK_CURVE_CONDITIONS if args.quick else tradeoff.CURVE_CONDITIONS)


def _slow_plans(args: argparse.Namespace, default: str) -> list[Plan]:
    if args.resume and not args.json:
        raise ValueError("--resume: only with --json")
    args.conditions = args.conditions or default
    args.algorithms = args.algorithms or tradeoff.WAN_CONTENDERS
    args.model = args.model or "layers25m/10"
    return _plan(args, (args.hosts if args.hosts is not None else 4,))


def _plan(args: argparse.Namespace, hosts: Sequence[int]) -> list[Plan]:
    quick = args.quick
    default = tradeoff.QUICK_CONDITIONS if quick else tradeoff.FULL_CONDITIONS
    asked = args.algorithms or (tradeoff.QUICK_CONTENDERS if quick else "")
    names = contenders.split_names(asked) if asked else _everyone()
    for name in names:
        contenders.get(name)
    if args.profile and args.profile not in names:
        raise ValueError(f"--profile: {args.profile!r} is not among the contenders of this run")
    for option in ("steps", "budget_s", "compute_ms"):
        value = getattr(args, option)
        if value is not None and not value > 0:
            raise ValueError(f"--{option.replace('_', '-')}: expected a number > 0, got {value}")
    again = args.again if args.again is not None else 0 if quick else 2
    if again < 0:
        raise ValueError(f"--again: expected a number >= 0, got {args.again}")
    if not 0 <= args.forward_share <= 1:
        raise ValueError(f"--forward-share: expected a share in [0, 1], got {args.forward_share}")
    chosen = tradeoff.parse_conditions("nolimit" if args.local else args.conditions or default)
    plans = []
    for num in hosts:
        if num < 1:
            raise ValueError(f"--hosts: expected a number >= 1, got {num}")
        plan = Plan(
            conditions=chosen,
            contenders=names,
            hosts=num,
            model=args.model or ("layers25m/10" if quick else "layers25m"),
            compute_ms=args.compute_ms or (100 if quick else 300),
            forward_share=args.forward_share,
            steps=args.steps or (5 if quick else 10),
            budget_s=args.budget_s or (4 if quick else 20),
            emulated=args.optimizer == "emulated",
            local=args.local,
            profile=args.profile,
            again=again,
            memory=getattr(args, "memory", False),
        )
        tradeoff.check(plan)
        plans.append(plan)
    return plans


def _everyone() -> tuple[str, ...]:
    return tuple(name for name in contenders.available() if not name.startswith(contenders.OFF))


def _scaling_plans(args: argparse.Namespace) -> list[Plan]:
    args.conditions = args.conditions or scaling.CONDITIONS
    args.model = args.model or "layers25m/10"
    return _plan(args, args.hosts or ((2, 4) if args.quick else scaling.HOSTS))


def _scaling(args: argparse.Namespace, plans: Sequence[Plan]) -> int:
    rows: list[dict[str, Any]] = []

    def keep(report: dict[str, Any]) -> None:
        rows[:] = report["rows"]
        _write(args, report)

    scaling.run(plans, args.profile_dir, _say, keep)
    return 0 if any(not row["error"] for row in rows) else 1


def _transfers_wanted(args: argparse.Namespace) -> dict[str, Any]:
    default = "1gbit/2ms" if args.quick else wire.CONDITIONS
    if args.hosts < 1:
        raise ValueError(f"--hosts: expected a number >= 1, got {args.hosts}")
    sizes = args.sizes or (wire.QUICK_SIZES if args.quick else primitives.SIZES)
    if min(sizes) < 4 * args.hosts:
        raise ValueError(f"--sizes: {min(sizes)} bytes are less than an element for each of {args.hosts} hosts")
    return {
        "conditions": tradeoff.parse_conditions("nolimit" if args.local else args.conditions or default),
        "hosts": args.hosts,
        "local": args.local,
        "sizes": sizes,
        "budget_s": 0.5 if args.quick else 2.0,
    }


def _primitives(args: argparse.Namespace, wanted: dict[str, Any]) -> int:
    report = wire.run_primitives(**wanted, told=_say, keep=partial(_write, args))
    return 0 if any(not row["error"] for row in report["rows"]) else 1


def _read(args: argparse.Namespace) -> dict[str, Any]:
    return merged(args.files)


def _report(args: argparse.Namespace, report: dict[str, Any]) -> int:
    made = tables.document(report)
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(made + "\n")
    else:
        print(made)
    _write(args, report)
    return 0


def _write(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if args.json is not None:
        results_file.write(args.json, report)
    _draw(args, report)


def _draw(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if args.plots is None:
        return
    try:
        written = plots.plot_report(report, args.plots)
    except ModuleNotFoundError:
        print("no figures: matplotlib is not installed: pip install 'bagua[demo]'", file=sys.stderr)
        return
    for path in written:
        print(f"written: {path}")
    if not written:
        print("no figures: they need at least two bandwidths, two latencies or two numbers of hosts")


def _say(line: str) -> None:
    print(line, flush=True)


_COMMANDS: dict[str, tuple[Any, Any]] = {
    "tradeoff": (_tradeoff_plans, _tradeoff),
    "wan": (_wan_plans, _tradeoff),
    "curves": (_curve_plans, _tradeoff),
    "scaling": (_scaling_plans, _scaling),
    "primitives": (_transfers_wanted, _primitives),
    "report": (_read, _report),
}

if __name__ == "__main__":
    sys.exit(main())
