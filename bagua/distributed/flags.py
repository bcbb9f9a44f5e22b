"""Bagua's own launcher flags: declared, checked, and turned into the workers' environment."""

from __future__ import annotations

import os
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable

import torch
from torch.distributed.argparse_util import check_env, env

from bagua import net

__all__ = ["add_bagua_arguments", "apply_bagua_arguments", "option", "report_without_effect"]

# What a flag that has no effect answers, by the name of its attribute.
_WITHOUT_EFFECT = {
    "bagua_service_port": "Bagua runs no server any more",
    "autotune_max_samples": "it tunes nothing at --autotune-level 0",
    "autotune_sampling_confidence_time": "it tunes nothing at --autotune-level 0",
    "autotune_warmup_time": "it tunes nothing at --autotune-level 0",
    "is_output_autotune_log": "it tunes nothing at --autotune-level 0",
}


def option(name: str) -> tuple[str, ...]:
    """Both spellings of a flag: `--a-b` and `--a_b`."""
    dashed, underscored = "--" + name.replace("_", "-"), "--" + name
    return (dashed,) if dashed == underscored else (dashed, underscored)


def add_bagua_arguments(parser: ArgumentParser) -> None:
    """Add Bagua's flags. As with torchrun's own, `PET_<NAME>` in the environment is the default."""
    group = parser.add_argument_group("Bagua")

    def add(name: str, kind: type[Action], **kw: object) -> None:
        group.add_argument(*option(name), action=kind, **kw)  # pyright: ignore[reportArgumentType]

    add(
        "default_bucket_size",
        env,
        type=_positive_int,
        metavar="BYTES",
        help="size at which a bucket is closed; sets BAGUA_DEFAULT_BUCKET_SIZE for the workers",
    )
    add("autotune_level", env, type=int, help="0, no tuning, is the one level there is")
    add("autotune_max_samples", env, type=int, help="accepted, without effect at level 0")
    add("autotune_sampling_confidence_time", env, type=float, help="accepted, without effect at level 0")
    add("autotune_warmup_time", env, type=float, help="accepted, without effect at level 0")
    add("is_output_autotune_log", check_env, help="accepted, without effect at level 0")
    add("bagua_service_port", env, type=int, help="accepted, without effect: there is no server any more")
    add("enable_bagua_net", check_env, help="have NCCL load Bagua-Net, which uses several TCP flows a connection")


def apply_bagua_arguments(parser: ArgumentParser, args: Namespace) -> None:
    """Refuse what cannot be had, name what has no effect, and set the environment the workers inherit.

    Raises:
        SystemExit: by `parser.error`, for a flag whose feature does not exist.
    """
    if args.autotune_level:
        parser.error(f"--autotune-level {args.autotune_level}: there is no tuning yet, only level 0 is possible")
    if args.enable_bagua_net:
        _enable_bagua_net(parser)
    report_without_effect(parser, args, _WITHOUT_EFFECT)
    if args.default_bucket_size is not None:
        os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = str(args.default_bucket_size)


def report_without_effect(parser: ArgumentParser, args: Namespace, reasons: dict[str, str]) -> None:
    """Name each flag of `reasons` that was given once on stderr."""
    for name, reason in _given(args, reasons.items()):
        print(f"{parser.prog}: {option(name)[0]} has no effect: {reason}", file=sys.stderr)


def _enable_bagua_net(parser: ArgumentParser) -> None:
    try:
        net.enable()
    except (RuntimeError, ValueError) as error:
        parser.error(f"--enable-bagua-net: {error}")
    if not torch.cuda.is_available():
        reason = "no CUDA device here, so NCCL is not in play and nothing loads Bagua-Net"
        print(f"{parser.prog}: --enable-bagua-net: {reason}", file=sys.stderr)


def _given(args: Namespace, items: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, reason) for name, reason in items if getattr(args, name) not in (None, False)]


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ArgumentTypeError(f"must be a positive number of bytes, not {value}")
    return value
