"""`bagua run` without `--fault-tolerant`: what `bagua top` can see of the ranks of this host."""

from __future__ import annotations

import os
import socket
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bagua.distributed.run_directory import run_directory
from bagua.status.host_status import HostStatus
from bagua.status.rank_status import STATUS

__all__ = ["serve_status"]


@contextmanager
def serve_status(args: Namespace, prog: str) -> Iterator[None]:
    """Answer observers of this user on this machine, until the block ends.

    Args:
        args: parsed flags of `bagua run`.
        prog: what was called.
    """
    with ExitStack() as kept:
        try:
            status = HostStatus(kept.enter_context(run_directory()), partial(_describe, _name(args)))
        except OSError as error:
            print(f"{prog}: `bagua top` cannot see this job: {error}", file=sys.stderr)
        else:
            kept.callback(status.close)
            kept.callback(os.environ.pop, STATUS, None)
            os.environ[STATUS] = str(status.ranks)
        yield


def _describe(job: str) -> dict[str, Any]:
    return {"job": job, "host": socket.gethostname(), "fault_tolerant": False}


def _name(args: Namespace) -> str:
    """The same on all hosts of a job, and another one for each job of one host."""
    if args.rdzv_id != "none":
        return args.rdzv_id
    if args.nnodes in ("1", "1:1") or args.standalone:
        return f"{Path(args.training_script).stem}.{os.getpid()}"
    return args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
