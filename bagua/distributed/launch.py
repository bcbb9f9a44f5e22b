"""`python -m bagua.distributed.launch`: the launcher of older scripts, on top of torchrun's.

    python -m bagua.distributed.launch --nproc_per_node 4 --set_additional_flag train.py

Differs: from Bagua 0.9, in that on one node without `--master_port` a free port is chosen always, not
29500; and in that `--logdir` names torchrun's log directory (a folder per run, attempt and rank).
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.utils import macros

from bagua.distributed.flags import apply_bagua_arguments, option, report_without_effect
from bagua.distributed.run import get_args_parser as _run_parser
from bagua.distributed.start import start

__all__ = ["get_args_parser", "main"]

_WITHOUT_EFFECT = {
    "report_metrics": "there is no metrics server",
    "host_list": "this launcher starts the ranks of its own node only; baguarun starts those of several hosts",
    "ssh_port": "this launcher starts the ranks of its own node only; baguarun starts those of several hosts",
}


def get_args_parser() -> ArgumentParser:
    """The parser of `bagua run` with the flags that only this launcher had."""
    parser = _run_parser("python -m bagua.distributed.launch")
    parser.description = "Start a script on every rank of this node, as older scripts expect it."
    group = parser.add_argument_group("Older scripts")
    group.add_argument(
        *option("set_additional_flag"),
        action=check_env,
        help="give the script --local_rank=N as first argument",
    )
    group.add_argument("--logdir", action=env, help="write each rank's stdout and stderr below this folder")
    group.add_argument(*option("report_metrics"), action=check_env, help="accepted, without effect")
    group.add_argument(*option("host_list"), action=env, help="accepted, without effect")
    group.add_argument(*option("ssh_port"), action=env, type=int, help="accepted, without effect")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Launch and wait.

    Returns:
        0 when all ranks exited with 0, 128 + n when signal n ended the launch, else 1.
    """
    parser = get_args_parser()
    args = parser.parse_args(argv)
    apply_bagua_arguments(parser, args)
    report_without_effect(parser, args, _WITHOUT_EFFECT)
    _translate(args)
    if args.rdzv_backend == "static" and not args.standalone:  # otherwise nodes are numbered as they come
        os.environ["NODE_RANK"] = str(args.node_rank)
    return start(args, parser.prog)


def _translate(args: Namespace) -> None:
    if args.set_additional_flag:
        args.training_script_args = [f"--local_rank={macros.local_rank}", *args.training_script_args]
    if args.logdir is not None:
        args.log_dir = args.log_dir or args.logdir
        if args.redirects == "0" and args.tee == "0":
            args.redirects = "3"


if __name__ == "__main__":
    sys.exit(main())
