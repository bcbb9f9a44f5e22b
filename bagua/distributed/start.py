"""Run torchrun's launch on parsed arguments, and answer with an exit code and a summary of what failed."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import run

from bagua.distributed.failures import FirstFailure

__all__ = ["start"]


def start(args: Namespace, prog: str) -> int:
    """Launch what `args` describe and wait for it.

    Returns:
        0 when all ranks exited with 0, 128 + n when signal n ended the launch, else 1.
    """
    # Shared with the launcher's own store, a restarted gloo group finds the addresses of the attempt before
    # it.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    nested = "TORCHELASTIC_ERROR_FILE" in os.environ
    try:
        # A launcher that was itself launched passes on, through `record`, the failure that came first.
        (record(_run) if nested else _run)(args)
    except ChildFailedError as failure:
        print(failure, file=sys.stderr)
        return 1
    except SignalException as interrupt:
        number = signal.Signals(interrupt.sigval)
        print(f"{prog}: ended by {number.name}; all ranks of this node have ended", file=sys.stderr)
        return 128 + number
    return 0


def _run(args: Namespace) -> None:
    try:
        run(args)
    except ChildFailedError as failure:
        raise FirstFailure(failure.name, failure.failures) from None
