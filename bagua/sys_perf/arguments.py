"""The command line of the synthetic benchmark."""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

import bagua
from bagua.sys_perf.catalogue import OWN, SOURCES

__all__ = ["algorithm_options", "get_args_parser", "parse"]

_OWN_OPTIMIZER = ("qadam", "one_bit_lamb", "zero_one_adam")


def get_args_parser(prog: str) -> ArgumentParser:
    """The flags of Bagua 0.9's benchmark, and those that scale it down to a CPU."""
    names = [row.name for row in bagua.algorithms.available()]
    parser = ArgumentParser(
        prog=prog,
        description="Samples per second of a known model on synthetic data. Start it alone or with `bagua run`.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="resnet50", help=f"{', '.join(OWN)}, or another classifier of an installed torchvision")
    add("--batch-size", type=_positive, default=32, help="samples per rank and step")
    exact = f"with {', '.join(_OWN_OPTIMIZER)} all but the last are exact"
    add("--num-warmup-batches", type=_not_negative, default=10, help=f"steps before the measurement; {exact}")
    add("--num-batches-per-iter", type=_positive, default=10, help="steps per timed iteration")
    add("--num-iters", type=_positive, default=10, help="number of timed iterations")
    add("--no-cuda", action="store_true", help="run on the CPU")
    add("--deterministic", action="store_true", help="deterministic kernels: the same loss in every run")
    add("--algorithm", choices=names, default="gradient_allreduce", metavar="NAME", help=f"one of {', '.join(names)}")
    add("--async-sync-interval", type=_positive, default=500, help="sync_interval_ms of the algorithm async")
    add("--async-warmup-steps", type=_not_negative, default=0, help="warmup_steps of the algorithm async")
    add("--amp", action="store_true", help="mixed precision: fp16 with loss scaling on a GPU, bf16 on a CPU")
    add("--fuse-optimizer", action="store_true", help="step on flat tensors with bagua.optim.fuse")
    add("--fp16-allreduce", action="store_true", help="gradient_allreduce: send and sum gradients in fp16")
    add("--use-adasum", action="store_true", help="do not scale the learning rate with the ranks; no other effect")
    group = parser.add_argument_group("scaling it down or up")
    group.add_argument("--image-size", type=_positive, default=224, help="side of the images, pixels")
    group.add_argument("--seq-length", type=_positive, default=128, help="tokens of a sequence, for BERT, 512 at most")
    group.add_argument(
        "--scale", type=float, default=1.0, help="factor of the widths; other than 1: built-in definitions"
    )
    group.add_argument("--source", choices=SOURCES, default="auto", help="of the model's definition")
    group.add_argument("--bucket-bytes", type=_positive, help="bucket size; default: Bagua's")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    return parser


def parse(parser: ArgumentParser, argv: list[str] | None) -> Namespace:
    """Read the command line; what does not go together ends the program with exit code 2."""
    args = parser.parse_args(argv)
    if args.fp16_allreduce and args.algorithm != "gradient_allreduce":
        parser.error(f"--fp16-allreduce goes with --algorithm gradient_allreduce, not {args.algorithm}")
    if args.fuse_optimizer and args.algorithm in _OWN_OPTIMIZER:
        parser.error(f"--fuse-optimizer: the optimizer of {args.algorithm} cannot be fused")
    if "bert" in args.model and not 2 <= args.seq_length <= 512:
        parser.error(f"--seq-length: expected 2 to 512 tokens, got {args.seq_length}")
    if "bert" not in args.model and args.image_size < 32:
        parser.error(f"--image-size: expected at least 32 pixels, got {args.image_size}")
    if args.deterministic and args.algorithm == "async":
        parser.error("--deterministic: async cannot be deterministic, because its averaging depends on timing")
    return args


def algorithm_options(args: Namespace) -> dict[str, Any]:
    """Options of the chosen algorithm."""
    if args.algorithm == "async":
        return {"sync_interval_ms": args.async_sync_interval, "warmup_steps": args.async_warmup_steps}
    return {"codec": "fp16"} if args.fp16_allreduce else {}


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _not_negative(text: str) -> int:
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number, not {text!r}") from None
    if value < least:
        raise ArgumentTypeError(f"must be at least {least}, not {value}")
    return value
