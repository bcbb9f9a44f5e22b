"""Finds the hosts of a job and asks them: this user's launchers on this machine, or those of a fault-tolerant job."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bagua.status.frames import StatusError, ask
from bagua.status.host_status import SOCKET, ask_socket
from bagua.top.picture import Picture, picture_of, text_of

__all__ = ["Observer", "TopError"]

_HOST_S = 3.0  # for a host to answer: it waits at most 1 s for its ranks


class TopError(Exception):
    """What is asked for is not there; one line for the user."""


class Observer:
    """Looks at one job.

    Args:
        address: host:port of a store of a fault-tolerant job, as in `--rdzv-endpoint`; None: launchers of this user
            on this machine.
        job: name of the job, or its beginning; None: the only one.
        token: the user's `BAGUA_JOB_TOKEN`; None: the one that the first host has drawn.
    """

    def __init__(self, address: str | None, job: str | None, token: bytes | None) -> None:
        self._address, self._wanted, self._token = address, job, token
        self._remote: dict[str, tuple[str, bytes]] = {}  # name of a host: address of its status, token
        self._before: Picture | None = None

    def look(self) -> Picture:
        """Ask all hosts.

        Raises:
            TopError: there is no such job, or it does not answer.
        """
        replies = self._ask_local() if self._address is None else self._ask_first(self._address)
        missing = self._ask_members(replies)
        self._before = picture_of(replies, missing, self._before)
        return self._before

    def _ask_local(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def look(directory: Path) -> None:
            try:
                told = ask_socket(directory / SOCKET, time.monotonic() + _HOST_S)
            except (OSError, StatusError):  # of another user, or a launcher that has ended
                return
            if isinstance(told, dict):
                found.append(told)

        directories = [path for path in Path(tempfile.gettempdir()).glob("bagua-run-*") if _is_mine(path)]
        _at_once([lambda each=each: look(each) for each in directories])
        jobs = sorted({text_of(told.get("job")) for told in found})
        chosen = [job for job in jobs if self._wanted is None or job == self._wanted]
        chosen = chosen or [job for job in jobs if job.startswith(self._wanted or "")]
        if not jobs:
            raise TopError(
                "no job runs here: this user has no `bagua run` on this machine; for a fault-tolerant job elsewhere "
                "give HOST:PORT of its --rdzv-endpoint"
            )
        if not chosen:
            raise TopError(f"--job {self._wanted}: no such job; there are: {', '.join(jobs)}")
        if len(chosen) > 1:
            raise TopError(f"several jobs run here; choose one with --job: {', '.join(chosen)}")
        self._wanted = chosen[0]
        return [told for told in found if text_of(told.get("job")) == chosen[0]]

    def _ask_first(self, address: str) -> list[dict[str, Any]]:
        """One host of the job: that of the address, or one that was seen before."""
        problem: Exception | None = None
        for name, (status, token) in list(self._remote.items()):
            try:
                return [_ask_remote(status, token)]
            except (OSError, StatusError) as error:
                problem = error
                del self._remote[name]
        try:
            told = _ask_remote(*_status_of(address, self._token))
        except (OSError, StatusError) as error:
            raise TopError(f"{address}: {error or type(error).__name__}") from problem
        if self._wanted is not None and not text_of(told.get("job")).startswith(self._wanted):
            raise TopError(f"--job {self._wanted}: {address} serves job {text_of(told.get('job'))}")
        return [told]

    def _ask_members(self, replies: list[dict[str, Any]]) -> dict[str, str]:
        """Those that have not answered yet; their replies are added. Returns why the others do not."""
        known = {text_of(reply.get("host")) for reply in replies}
        stores: dict[str, str] = {}
        missing: dict[str, str] = {}
        for reply in replies:
            for entry in reply.get("members") or ():
                if isinstance(entry, list) and len(entry) == 3 and all(isinstance(each, str) for each in entry[::2]):
                    stores.setdefault(text_of(entry[0]), entry[2])
            suspected = reply.get("suspected")
            for name, why in suspected.items() if isinstance(suspected, dict) else ():
                missing[text_of(name)] = text_of(why)
        more: list[dict[str, Any]] = []

        def look(name: str, store: str) -> None:
            try:
                if name not in self._remote:
                    self._remote[name] = _status_of(store, self._token)
                more.append(_ask_remote(*self._remote[name]))
                missing.pop(name, None)
            except (OSError, StatusError) as error:
                self._remote.pop(name, None)
                missing.setdefault(name, str(error) or type(error).__name__)

        others = [(name, store) for name, store in stores.items() if name not in known]
        _at_once([lambda name=name, store=store: look(name, store) for name, store in others])
        for name, _ in others:
            if name not in {text_of(told.get("host")) for told in more}:
                missing.setdefault(name, "no answer")
        replies += more.copy()
        return dict(sorted(missing.items()))


def _status_of(address: str, token: bytes | None) -> tuple[str, bytes]:
    """Where the host whose store is at `address` answers observers, and the job's token.

    Raises:
        OSError: nobody answers there.
        StatusError: it is no store of a job, or the job has another token.
    """
    from bagua.distributed import job_store  # with torch, which takes seconds to import

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise StatusError("expected HOST:PORT")
    host = host.strip("[]")
    try:
        socket.create_connection((host, int(port)), timeout=_HOST_S).close()
    except OSError as error:
        raise OSError(f"nobody answers: {error.strerror or error}") from None
    notes, stores = job_store.ask([address])
    note, store = notes[0], stores[0]
    if store is None:
        raise StatusError("something answers that is no store of a job, or is stopped")
    if note is None:
        raise StatusError(
            "the store there knows no fault-tolerant job: none was founded yet, or it was started without"
        )
    if token is None and not note.token:
        raise StatusError("the hosts of this job were given a BAGUA_JOB_TOKEN; set the same one here")
    known = bytes.fromhex(note.token) if token is None else token
    if job_store.fingerprint(known, note.job) != note.check:
        raise StatusError("BAGUA_JOB_TOKEN is not the one that the hosts of this job were given")
    try:
        status = job_store.status_address(store)
    except RuntimeError:
        raise StatusError("the store there has stopped answering") from None
    if status is None:
        raise StatusError("the host there tells observers nothing; its version of bagua is older")
    return status, known


def _ask_remote(address: str, token: bytes) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _HOST_S
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_HOST_S) as sock:
            told = ask(sock, token, deadline)
    except ValueError:
        raise StatusError("expected HOST:PORT") from None
    if not isinstance(told, dict):
        raise StatusError("it serves no status of a job")
    return told


def _is_mine(path: Path) -> bool:
    try:
        return not path.is_symlink() and path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _at_once(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call, name="bagua-top", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 4 * _HOST_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
