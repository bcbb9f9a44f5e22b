"""The command line of a rank, from the launcher's flags."""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from torch.distributed.elastic.utils import macros

__all__ = ["check_preload", "rank_command"]


def rank_command(args: Namespace, local_rank: int) -> list[str]:
    """As torchrun makes it.

    Raises:
        ValueError: `--module` with `--no-python`.
    """
    words = [] if args.no_python else [os.getenv("PYTHON_EXEC", sys.executable), "-u"]
    if args.module:
        if args.no_python:
            raise ValueError("--module: not with --no-python")
        words.append("-m")
    return [*words, args.training_script, *macros.substitute(args.training_script_args, str(local_rank))]


def check_preload(args: Namespace) -> None:
    """Refuse `--preload` where ranks do not run a script in this Python.

    Raises:
        ValueError: names the other flag.
    """
    if args.no_python or os.getenv("PYTHON_EXEC", sys.executable) != sys.executable:
        raise ValueError("--preload: ranks are forked from this Python; not with --no-python or PYTHON_EXEC")
    if args.run_path:
        raise ValueError("--preload: not with --run-path, whose ranks are torch's own processes")
