"""The store in which the ranks of a job with fault tolerance meet, and a rank that is lost."""

from __future__ import annotations

import socket

import torch.distributed as dist
from torch import nn

from bagua.engine.hooks import attachments

__all__ = ["Killed", "drop_rank", "serve_store"]


class Killed(BaseException):
    """This rank is lost."""


def serve_store() -> tuple[str, dist.TCPStore]:
    """As a launcher does: its address, and the store, which is served as long as it is referred to."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    served = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return f"127.0.0.1:{port}", served


def drop_rank(module: nn.Module) -> None:
    """Close what the rank of this thread communicates with, as if its process had been killed."""
    failures = attachments[module].engine.failures
    assert failures.recovery is not None
    failures.recovery.sever()
    failures.give_up()
