"""Write uncaught exceptions to the launcher's error file, without `@record` on the script's main."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from bagua.errors import CommunicationError

__all__ = ["install"]

_PEER_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|socket closed|connectFullMesh|"
    r"timed out (after )?wait|remote server|ncclRemoteError|watchdog",
    re.IGNORECASE,
)
_installed = False


def install() -> None:
    """Report uncaught exceptions of the main thread to torchrun and `bagua run`. Repeated calls are free.

    Without a launcher (no `TORCHELASTIC_ERROR_FILE` in the environment) nothing is done. The exception is
    still printed as before. A file that `@record` has written is left as it is.
    """
    global _installed
    if _installed or not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return
    _installed = True
    pid, previous = os.getpid(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        # A forked child shares the path, and its failure is not the rank's.
        if os.getpid() == pid and isinstance(error, Exception):
            _write(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), error)
        previous(kind, error, tb)

    sys.excepthook = hook


def _write(path: Path, error: Exception) -> None:
    if path.exists():
        return
    now_ns = time.time_ns()
    lost = is_peer_loss(error)
    # The launcher compares whole seconds, and of equals it takes the lowest rank. A rank that fails because
    # another one did must not win: the first failure of this host is rounded down, all that follow up.
    first = not lost and not any(path.parent.parent.glob("*/error.json"))
    record = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
                "timestamp": str(now_ns // 10**9 + (0 if first else 1)),
                "time_ns": now_ns,
                "peer_lost": lost,
            },
        }
    }
    partial = path.with_suffix(".partial")
    try:
        # In one move: the launcher may kill this rank at any moment, and it fails on half a file.
        partial.write_text(json.dumps(record))
        os.replace(partial, path)
    except OSError as failure:
        print(f"bagua: cannot leave the traceback for the launcher: {failure}", file=sys.stderr)


def is_peer_loss(error: BaseException) -> bool:
    """Whether `error` is the consequence of another rank's exit rather than this rank's fault."""
    return any(
        isinstance(e, (CommunicationError, dist.DistError, ConnectionError))
        or (isinstance(e, RuntimeError) and _PEER_LOST.search(str(e)) is not None)
        for e in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
