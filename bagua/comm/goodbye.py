"""Leave `torch.distributed` in order when the script ends.

A script that just ends, with or without `destroy_process_group`, must exit 0 on every rank. Three things
stand in the way on gloo (all seen with torch 2.13):

- A collective whose `Work` was dropped still runs in one of gloo's threads. When it ends while the
  interpreter is being torn down, that thread asks for the GIL to release its tensors, Python ends the thread
  instead, and C++ answers with `terminate called without an active exception`, exit code -6.
- A rank that raises while a collective is in flight waits in the group's destructor until the peers join in,
  up to the group's timeout of 30 minutes.
- The rank that hosts the rendezvous store may leave while others still need it.

So at exit each rank says in the store that it has arrived, waits a few seconds for the others, and destroys
the groups while the interpreter is whole, which drains gloo's threads; the host leaves last. A rank that
fails says so, which frees the others at once, waits for nobody and ends within `_FAILED_GRACE_S` whatever is
in flight.

Where the guarantee ends: a daemon thread of the script that is inside a collective at exit can still abort
the process (Python before 3.14); threads of Bagua's own are stopped by hooks given to `before_exit`.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process, util
from typing import TextIO

import torch.distributed as dist

__all__ = ["before_exit", "cancel", "install"]

_log = logging.getLogger("bagua")
_TIMEOUT_S = 5.0
_FAILED_GRACE_S = 3.0
_STUCK_S = 30.0
_HOST_WAIT_S = 2.0


@dataclass
class _Farewell:
    pid: int
    rank: int
    size: int
    store: dist.Store
    origin: dist.Store
    timeout_s: float


_farewell: _Farewell | None = None
_hooks: list[Callable[[], None]] = []
_registered = False
_devnull: TextIO | None = None


def install(timeout_s: float | None = None) -> None:
    """Arrange an orderly end of this process. Call after each `init_process_group`; repeated calls are free.

    Args:
        timeout_s: how long a rank that ends waits for ranks that have not ended. It never waits for a rank
        that
            said that it failed. Default 5, or what an earlier call for the same group said.
    """
    global _farewell, _registered
    origin = dist.distributed_c10d._get_default_store()
    if _farewell is not None and _farewell.origin is origin and _farewell.pid == os.getpid():
        if timeout_s is not None:
            _farewell.timeout_s = timeout_s
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    _farewell = _Farewell(os.getpid(), rank, size, _own_client(origin, size), origin, timeout_s or _TIMEOUT_S)
    if not _registered:
        _registered = True
        atexit.register(_leave)
        # Children of multiprocessing end without atexit, but run these.
        if parent_process() is not None:
            util.Finalize(None, _leave, exitpriority=100)


def before_exit(hook: Callable[[], None]) -> None:
    """Have `hook` called first thing at exit, the last registered first. It must be quick and never block."""
    if hook not in _hooks:
        _hooks.append(hook)


def cancel() -> None:
    """Forget the arrangement: nothing of this module happens at exit, until the next `install`."""
    global _farewell
    _farewell = None


def _own_client(store: dist.Store, size: int) -> dist.Store:
    """A connection of our own: a thread that waits in the shared one holds its lock all the while."""
    if size == 1:
        return store
    try:
        client: dist.Store = getattr(store, "clone")()  # noqa: B009  (torch's stubs lack it)
    except RuntimeError:
        _log.debug("this store cannot be cloned; the goodbye shares it")
        return store
    client.set_timeout(timedelta(seconds=10))
    return dist.PrefixStore("bagua/goodbye", client)


def _leave() -> None:
    global _farewell
    farewell, _farewell = _farewell, None
    # A forked child inherits this handler together with its parent's sockets.
    if farewell is None or farewell.pid != os.getpid():
        return
    failed = _script_failed()
    if failed:
        _end_within(_FAILED_GRACE_S, quiet=True)
    else:
        _end_within(farewell.timeout_s + _STUCK_S, quiet=False)
    _run_hooks(failed)
    met = _meet(farewell, failed)
    if not failed and not met:
        # A peer that still trains may yet join what is in flight: it would be wrong to cut that short.
        faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized() and (met or "nccl" not in dist.get_backend_config()):
        dist.destroy_process_group()
    if met:
        _host_leaves_last(farewell)
    if not failed:
        faulthandler.cancel_dump_traceback_later()


def _script_failed() -> bool:
    """Whether an uncaught exception ends the process. A `SystemExit` leaves no trace in the main process."""
    if hasattr(sys, "last_exc") or hasattr(sys, "last_value"):
        return True
    # In a multiprocessing child the exception is still on its way when the finalizers run.
    current = sys.exc_info()[1]
    return current is not None and not (isinstance(current, SystemExit) and current.code in (None, 0))


def _end_within(seconds: float, quiet: bool) -> None:
    """Exit with code 1 after `seconds`. The timer lives in C: it needs no GIL and no new Python thread."""
    global _devnull
    if quiet:
        _devnull = open(os.devnull, "w")  # noqa: SIM115  (the timer writes to it until the process is gone)
    target = _devnull or sys.__stderr__
    if target is not None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=target)


def _run_hooks(failed: bool) -> None:
    while _hooks:
        try:
            _hooks.pop()()
        except Exception:
            _log.log(logging.DEBUG if failed else logging.WARNING, "a hook failed at exit", exc_info=True)


def _meet(farewell: _Farewell, failed: bool) -> bool:
    """Whether all ranks have arrived. False as soon as one has failed, or after the timeout."""
    if farewell.size == 1:
        return True
    store = farewell.store
    try:
        if failed:
            store.add("failed", 1)
            return False
        store.add("arrived", 1)
        return _poll(
            lambda: store.add("arrived", 0) >= farewell.size,
            farewell.timeout_s,
            give_up=lambda: store.add("failed", 0) > 0,
        )
    except RuntimeError:
        _log.debug("the store is gone, and with it the rank that hosts it", exc_info=True)
        return False


def _host_leaves_last(farewell: _Farewell) -> None:
    """Rank 0, which hosts the store unless the launcher does, waits until nobody has a question left."""
    if farewell.size == 1:
        return
    try:
        farewell.store.add("gone", 1)
        if farewell.rank == 0:
            _poll(lambda: farewell.store.add("gone", 0) >= farewell.size, _HOST_WAIT_S)
    except RuntimeError:
        _log.debug("the store went first", exc_info=True)


def _poll(done: Callable[[], bool], timeout_s: float, give_up: Callable[[], bool] | None = None) -> bool:
    deadline, pause = time.monotonic() + timeout_s, 0.002
    while not done():
        if time.monotonic() > deadline or (give_up is not None and give_up()):
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True
