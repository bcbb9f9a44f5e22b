"""Orderly shutdown of `torch.distributed` at the end of the script.

A script that just ends, with or without `destroy_process_group`, must exit 0 on every rank. Three things
stand in the way on gloo (all seen with torch 2.13):

- A collective whose `Work` was dropped still runs in one of gloo's threads. When it ends while the
  interpreter is being torn down, that thread asks for the GIL to release its tensors, Python ends the thread
  instead, and C++ answers with `terminate called without an active exception`, exit code -6.
- A rank that raises while a collective is in flight waits in the group's destructor until the peers join in,
  up to the group's timeout of 30 minutes.
- The rank that hosts the rendezvous store may leave while others still need it.

So at exit each rank checks in with the store, waits a few seconds for the others, and destroys the groups
while the interpreter is intact, which drains gloo's threads; the host of the store exits last. A rank that
fails reports it, which releases the others at once. It waits for no rank and ends within `_FAILED_GRACE_S`,
whatever is in flight.

Limit of the guarantee: a daemon thread of the script that is inside a collective at exit can still abort
the process (Python before 3.14); threads of Bagua's own are stopped by hooks given to `before_exit`, and waited for by
`bagua.comm.own_threads`.
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
from typing import Any, TextIO

import torch.distributed as dist

from bagua.comm.backend_kind import backend_kind
from bagua.comm.store import BoundedStore, root_of
from bagua.errors import CommunicationError

__all__ = ["before_exit", "cancel", "install", "is_installed", "script_failed", "while_others_end"]

_log = logging.getLogger("bagua")
_TIMEOUT_S = 5.0
_FAILED_GRACE_S = 3.0
_STUCK_S = 30.0
_HOST_WAIT_S = 2.0


@dataclass
class _Shutdown:
    pid: int
    rank: int
    size: int
    store: dist.Store
    origin: dist.Store
    timeout_s: float


_shutdown: _Shutdown | None = None
_hooks: list[Callable[[], None]] = []
_waits: list[Callable[[], object]] = []
_registered = False
_devnull: TextIO | None = None


def install(timeout_s: float | None = None) -> None:
    """Arrange an orderly shutdown of this process. Call after each `init_process_group`; repeated calls are free.

    Args:
        timeout_s: how long a rank that ends waits for ranks that have not ended. It never waits for a rank that
            said that it failed. Default 5, or what an earlier call for the same group said.
    """
    global _shutdown, _registered
    origin = dist.distributed_c10d._get_default_store()
    if _shutdown is not None and _shutdown.origin is origin and _shutdown.pid == os.getpid():
        if timeout_s is not None:
            _shutdown.timeout_s = timeout_s
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    _shutdown = _Shutdown(os.getpid(), rank, size, _own_client(origin, size), origin, timeout_s or _TIMEOUT_S)
    if not _registered:
        _registered = True
        atexit.register(_shut_down)
        # Children of multiprocessing end without atexit, but run these.
        if parent_process() is not None:
            util.Finalize(None, _shut_down, exitpriority=100)


def before_exit(hook: Callable[[], None]) -> None:
    """Register `hook` to run first at exit, in reverse order of registration. It must be quick and never block."""
    if hook not in _hooks:
        _hooks.append(hook)


def while_others_end(wait: Callable[[], object]) -> None:
    """Register what this rank waits for where others have not ended in time: they may need it for what is in flight.

    It is called without arguments, not if this rank failed, and bounds its own time.
    """
    if wait not in _waits:
        _waits.append(wait)


def is_installed() -> bool:
    """Whether this process's end is arranged."""
    return _shutdown is not None and _shutdown.pid == os.getpid()


def cancel() -> None:
    """Undo `install`: this module does nothing at exit."""
    global _shutdown
    _shutdown = None


def _own_client(store: dist.Store, size: int) -> dist.Store:
    """A separate connection: a thread that waits in the shared one holds its lock meanwhile."""
    if size == 1:
        return store
    try:
        limit: timedelta = getattr(root_of(store), "timeout")  # noqa: B009  (torch's stubs lack it)
        client: dist.Store = BoundedStore(store, limit.total_seconds()).clone()
    except CommunicationError:
        _log.debug("this store cannot be cloned; the shutdown uses the same client")
        return store
    client.set_timeout(timedelta(seconds=10))
    return dist.PrefixStore("bagua/shutdown", client)


def _shut_down() -> None:
    global _shutdown
    shutdown, _shutdown = _shutdown, None
    # A forked child inherits this handler together with its parent's sockets.
    if shutdown is None or shutdown.pid != os.getpid():
        return
    failed = script_failed()
    if failed:
        _end_within(_FAILED_GRACE_S, quiet=True)
    else:
        _end_within(shutdown.timeout_s + _STUCK_S, quiet=False)
    _run_hooks(failed)
    all_arrived = _await_all(shutdown, failed)
    if not failed and not all_arrived:
        # A peer that still trains may yet join what is in flight: it would be wrong to cut that short.
        faulthandler.cancel_dump_traceback_later()
        for wait in _waits:
            wait()
    if dist.is_initialized() and (all_arrived or not carries_nccl(dist.group.WORLD)):
        dist.destroy_process_group()
    if all_arrived:
        _host_leaves_last(shutdown)
    if not failed:
        faulthandler.cancel_dump_traceback_later()


def script_failed() -> bool:
    """Whether an uncaught exception ends the process. A `SystemExit` leaves no trace in the main process."""
    if hasattr(sys, "last_exc") or hasattr(sys, "last_value"):
        return True
    # In a multiprocessing child the exception is still on its way when the finalizers run.
    current = sys.exc_info()[1]
    return current is not None and not (isinstance(current, SystemExit) and current.code in (None, 0))


def carries_nccl(process_group: Any) -> bool:
    """Whether NCCL carries tensors of some device for the group, whatever the name of its backend is."""
    backends = [process_group._get_backend(device) for device in process_group._device_types]
    return any(backend_kind(backend) == "nccl" for backend in backends)


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


def _await_all(shutdown: _Shutdown, failed: bool) -> bool:
    """Whether all ranks have arrived. False as soon as one has failed, or after the timeout."""
    if shutdown.size == 1:
        return True
    store = shutdown.store
    try:
        if failed:
            store.add("failed", 1)
            return False
        store.add("arrived", 1)
        return _poll(
            lambda: store.add("arrived", 0) >= shutdown.size,
            shutdown.timeout_s,
            give_up=lambda: store.add("failed", 0) > 0,
        )
    except RuntimeError:
        _log.debug("the store and the rank that hosts it have exited", exc_info=True)
        return False


def _host_leaves_last(shutdown: _Shutdown) -> None:
    """Rank 0, which hosts the store unless the launcher does, waits until no rank needs it any more."""
    if shutdown.size == 1:
        return
    try:
        shutdown.store.add("gone", 1)
        if shutdown.rank == 0:
            _poll(lambda: shutdown.store.add("gone", 0) >= shutdown.size, _HOST_WAIT_S)
    except RuntimeError:
        _log.debug("the store closed before this rank had said that it is done", exc_info=True)


def _poll(done: Callable[[], bool], timeout_s: float, give_up: Callable[[], bool] | None = None) -> bool:
    deadline, pause = time.monotonic() + timeout_s, 0.002
    while not done():
        if time.monotonic() > deadline or (give_up is not None and give_up()):
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True
