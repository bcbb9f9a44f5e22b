"""`bagua run`: torchrun, all of it, with Bagua's flags.

    bagua run --nproc-per-node 4 train.py --epochs 3
    python -m bagua.distributed.run --nproc-per-node 4 train.py --epochs 3

Differs: from torchrun, in that a restarted gloo job starts (each attempt gets a rendezvous store of its own,
unless `TORCH_DISABLE_SHARE_RDZV_TCP_STORE` is set to something else), that the summary of a failure leads
with the rank that failed first, and that Ctrl-C exits with 130. From the original, in torchrun's defaults:
`--max-restarts 0`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from torch.distributed.run import get_args_parser as _torchrun_parser

from bagua.distributed.flags import add_bagua_arguments, apply_bagua_arguments
from bagua.distributed.start import start

__all__ = ["get_args_parser", "main"]


def get_args_parser(prog: str = "bagua run") -> ArgumentParser:
    """torchrun's parser with Bagua's flags added."""
    parser = _torchrun_parser()
    parser.prog = prog
    parser.description = "Start a script on every rank: torchrun with Bagua's flags."
    add_bagua_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Launch and wait.

    Returns:
        0 when all ranks exited with 0, 128 + n when signal n ended the launch, else 1.
    """
    parser = get_args_parser()
    args = parser.parse_args(argv)
    apply_bagua_arguments(parser, args)
    return start(args, parser.prog)


if __name__ == "__main__":
    sys.exit(main())
