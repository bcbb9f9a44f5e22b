"""Bagua's own launcher flags: declared, checked, and turned into the workers' environment."""

from __future__ import annotations

import math
import os
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable

import torch
from torch.distributed.argparse_util import check_env, env

from bagua import net

__all__ = ["add_bagua_arguments", "apply_bagua_arguments", "option", "report_without_effect"]

# What a flag that has no effect answers, by the name of its attribute.
_WITHOUT_EFFECT = {"bagua_service_port": "Bagua no longer runs a server"}

# Flags of tuning, and the variables by which the workers learn of them.
_TUNING = {
    "autotune_max_samples": "BAGUA_AUTOTUNE_MAX_SAMPLES",
    "autotune_sampling_confidence_time": "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
    "autotune_warmup_time": "BAGUA_AUTOTUNE_WARMUP_TIME_S",
    "is_output_autotune_log": "BAGUA_IS_OUTPUT_AUTOTUNE_LOG",
}
_TOLERANT = ("detect_s", "max_wait_s")
_LEVEL = "BAGUA_AUTOTUNE"


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
        type=_positive_bytes,
        metavar="BYTES",
        help="bucket size in bytes; sets BAGUA_DEFAULT_BUCKET_SIZE for the workers",
    )
    add(
        "rank_order",
        env,
        type=_rank_order,
        metavar="ORDER",
        help="order of the ranks in rings: measured (by the links between hosts), or ranks with commas between them; "
        "sets BAGUA_RANK_ORDER for the workers",
    )
    add(
        "routes",
        env,
        choices=("measured", "direct"),
        help="measured: pairs of hosts whose own link is slow send through a third host where that is clearly faster; "
        "sets BAGUA_ROUTES for the workers",
    )
    add(
        "site",
        env,
        type=_site,
        metavar="NAME",
        help="where this host is: hierarchical exchanges sum within a site, and compress between sites; sets "
        "BAGUA_SITE for the workers",
    )
    add("autotune_level", env, type=int, help="1: tune bucket size, lanes and the like in the first steps; 0: do not")
    add("autotune_max_samples", env, type=_positive_int, metavar="N", help="maximum number of settings to measure")
    add(
        "autotune_sampling_confidence_time",
        env,
        type=_seconds,
        metavar="S",
        help="minimum time to measure one setting, seconds",
    )
    add("autotune_warmup_time", env, type=_seconds, metavar="S", help="seconds of training before tuning begins")
    add("is_output_autotune_log", check_env, help="write each measurement to a CSV file for temporary files")
    add("bagua_service_port", env, type=int, help="accepted, without effect: Bagua no longer runs a server")
    group.add_argument(
        *option("use_env"),
        action="store_true",
        default=True,
        help="accepted: ranks find LOCAL_RANK in their environment in any case",
    )
    add(
        "fault_tolerant",
        check_env,
        help="experimental: survivors of a lost rank or host train on without a restart",
    )
    add(
        "detect_s",
        env,
        type=float,
        metavar="S",
        help="with --fault-tolerant: silence in seconds after which a host, or a stopped rank, is taken for lost (2)",
    )
    add(
        "max_wait_s",
        env,
        type=float,
        metavar="S",
        help="with --fault-tolerant: seconds to wait for a host that answers but is slow (no limit)",
    )
    add(
        "preload",
        env,
        type=_module_names,
        metavar="MODULES",
        help="import these (torch,bagua for one) once on a host, and fork its ranks from that process: they start, and "
        "start again, seconds earlier",
    )
    add("enable_bagua_net", check_env, help="have NCCL load Bagua-Net, which uses several TCP flows per connection")


def apply_bagua_arguments(parser: ArgumentParser, args: Namespace) -> None:
    """Refuse what cannot be had, name what has no effect, and set the environment the workers inherit.

    Raises:
        SystemExit: by `parser.error`, for a level or a feature that does not exist.
    """
    if args.autotune_level not in (None, 0, 1):
        parser.error(f"--autotune-level {args.autotune_level}: expected 0 (no tuning) or 1")
    if args.enable_bagua_net:
        _enable_bagua_net(parser)
    report_without_effect(parser, args, _WITHOUT_EFFECT)
    if not args.fault_tolerant:
        report_without_effect(parser, args, dict.fromkeys(_TOLERANT, "it belongs to --fault-tolerant"))
    _pass_on_tuning(parser, args)
    if args.default_bucket_size is not None:
        os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = str(args.default_bucket_size)
    if args.rank_order is not None:
        os.environ["BAGUA_RANK_ORDER"] = args.rank_order
    if args.routes is not None:
        os.environ["BAGUA_ROUTES"] = args.routes
    if args.site is not None:
        os.environ["BAGUA_SITE"] = args.site


def _pass_on_tuning(parser: ArgumentParser, args: Namespace) -> None:
    """Tell the workers, through their environment; a level given there counts where no flag says another."""
    level = os.environ.get(_LEVEL) if args.autotune_level is None else str(args.autotune_level)
    if level in (None, "", "0"):
        report_without_effect(parser, args, dict.fromkeys(_TUNING, "nothing is tuned at --autotune-level 0"))
    if args.autotune_level is not None:
        os.environ[_LEVEL] = str(args.autotune_level)
    for name, variable in _TUNING.items():
        value = getattr(args, name)
        if value not in (None, False):
            os.environ[variable] = "1" if value is True else str(value)


def report_without_effect(parser: ArgumentParser, args: Namespace, reasons: dict[str, str]) -> None:
    """Name each flag of `reasons` that was given once on stderr."""
    for name, reason in _given(args, reasons.items()):
        print(f"{parser.prog}: {option(name)[0]} has no effect: {reason}", file=sys.stderr)


def _enable_bagua_net(parser: ArgumentParser) -> None:
    try:
        net.enable()
    except (RuntimeError, ValueError) as error:
        parser.error(f"--enable-bagua-net: {error}")
    if not torch.cuda.device_count():  # asks NVML first: after a call of CUDA no rank could be forked (--preload)
        reason = "this machine has no CUDA device, so NCCL is not used and nothing loads Bagua-Net"
        print(f"{parser.prog}: --enable-bagua-net: {reason}", file=sys.stderr)


def _given(args: Namespace, items: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, reason) for name, reason in items if getattr(args, name) not in (None, False)]


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ArgumentTypeError(f"must be positive, not {value}")
    return value


def _site(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ArgumentTypeError(f"expected the name of a site, got {text!r}")
    return text


def _rank_order(text: str) -> str:
    words = text.split(",")
    if text != "measured" and sorted(words) != sorted(map(str, range(len(words)))):
        raise ArgumentTypeError(f"must be measured, or each rank from 0 on once with commas between them, not {text}")
    return text


def _module_names(text: str) -> list[str]:
    names = text.split(",")
    if not all(word.isidentifier() for name in names for word in name.split(".")):
        raise ArgumentTypeError(f"must be names of modules with commas between them, not {text!r}")
    return names


def _positive_bytes(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ArgumentTypeError(f"must be a positive number of bytes, not {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"must be a number of seconds >= 0, not {text}")
    return value
