"""`bagua run`: torchrun, all of it, with Bagua's flags.

    bagua run --nproc-per-node 4 train.py --epochs 3
    python -m bagua.distributed.run --nproc-per-node 4 train.py --epochs 3

The second form has the defaults of Bagua 0.9's module of that name: `--nproc-per-node auto`, a rank for each GPU, or
each CPU core where there is none, and `--max-restarts 3`. The first has torchrun's: 1 and 0.

Differs: from torchrun, in that a restarted gloo job starts (where there may be several attempts, each gets a rendezvous
store of its own, unless `TORCH_DISABLE_SHARE_RDZV_TCP_STORE` is set to something else), that the root cause in the
summary of a failure is the rank that failed first, that Ctrl-C exits with 130 and nohup is respected, and that the
default `OMP_NUM_THREADS=1` is said in one line.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from torch.distributed.run import get_args_parser as _torchrun_parser

from bagua.distributed.flags import add_bagua_arguments, apply_bagua_arguments
from bagua.distributed.start import start

__all__ = ["get_args_parser", "main"]


_MODULE = "python -m bagua.distributed.run"
_OF_THE_ORIGINAL = {"nproc_per_node": "auto", "max_restarts": 3}


def get_args_parser(prog: str = "bagua run") -> ArgumentParser:
    """torchrun's parser with Bagua's flags added; under Bagua 0.9's name with its defaults."""
    parser = _torchrun_parser()
    parser.prog = prog
    parser.description = "Start a script on every rank: torchrun with Bagua's flags."
    add_bagua_arguments(parser)
    if prog == _MODULE:
        # What PET_... in the environment says is a default already.
        parser.set_defaults(**{k: v for k, v in _OF_THE_ORIGINAL.items() if f"PET_{k.upper()}" not in os.environ})
    for action in parser._actions:
        if action.dest == "training_script_args" and not action.help:  # torchrun says nothing of it
            action.help = "the script's own arguments"
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "bagua run") -> int:
    """Launch and wait.

    Args:
        argv: the flags, the script and its arguments; None takes the process's.
        prog: what was called.

    Returns:
        0 when all ranks exited with 0, 128 + n when signal n ended the launch, else 1.
    """
    parser = get_args_parser(prog)
    args = parser.parse_args(argv)
    apply_bagua_arguments(parser, args)
    return start(args, parser.prog)


if __name__ == "__main__":
    sys.exit(main(prog=_MODULE))
