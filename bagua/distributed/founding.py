"""How the launchers of a fault-tolerant job meet: they found it together, or find it and join.

Only the first host of the list founds a job, so no two halves of a network can. Each launcher notes in its own store
that the job is founded; a launcher that starts later, or again, asks all hosts of the list.
"""

from __future__ import annotations

import json
import math
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch.distributed import TCPStore

from bagua.distributed.job_store import JobNote, ServedStore, ask, fingerprint, in_threads
from bagua.membership import Epoch, Member
from bagua.membership.encoding import checked_argument
from bagua.membership.messages import MAX_ADDRESS, MAX_NAME
from bagua.membership.seat import ranks_in, store_in

__all__ = ["TOKEN", "Founding", "Job", "JoinError", "token_of_the_user"]

TOKEN = "BAGUA_JOB_TOKEN"  # environment variable: a secret of the job, given by the user
_POLL_S = (0.1, 0.3)  # between two looks
_PROBE_S = 2.0
_COUNT, _FOUNDER = "bagua/founders", "bagua/founder"


class JoinError(Exception):
    """The job was neither founded nor found, or it is another one."""


@dataclass(frozen=True)
class Job:
    """What a launcher needs to take part.

    Attributes:
        note: what it found or founded.
        token: of the agents.
        founder: this host is in the first epoch.
    """

    note: JobNote
    token: bytes
    founder: bool


class Founding:
    """Looks for the job, or founds it.

    Args:
        served: the store of this launcher.
        endpoints: hosts of the list.
        me: this host, as an agent.
        sizes: fewest and most hosts that found it.
        run_id: of the job; hosts of another one are refused.
        last_call_s: how long to wait for more once the fewest are there.
        token: given by the user; None: the founder draws one.
    """

    def __init__(
        self,
        served: ServedStore,
        endpoints: Sequence[tuple[str, int]],
        me: Member,
        sizes: tuple[int, int],
        run_id: str,
        last_call_s: float,
        token: bytes | None,
    ) -> None:
        self._served, self._me, self._sizes, self._run_id = served, me, sizes, run_id
        self._last_call_s, self._token = last_call_s, token
        self._addresses = [f"{host}:{port}" for host, port in endpoints]
        self._enough_since: float | None = None
        self._seen = 0  # founders that have come, for the message of a failure

    def join(self, timeout_s: float, say: Callable[[str], None]) -> Job:
        """Wait until the job is founded or found.

        Raises:
            JoinError: it was not in time, or a host serves another job.
        """
        deadline, told = time.monotonic() + timeout_s, False
        while True:
            job = self._look()
            if job is not None:
                self._served.note(job.note)
                return job
            if time.monotonic() > deadline:
                raise JoinError(self._missing(timeout_s))
            if not told and time.monotonic() > deadline - timeout_s + 10:
                told = True
                say(f"waiting for the job: {self._missing(10)}")
            time.sleep(random.uniform(*_POLL_S))

    def _look(self) -> Job | None:
        others = [address for place, address in enumerate(self._addresses) if place != self._served.place]
        notes, stores = ask(others)
        found = [note for note in notes if note is not None]
        for note in found:
            if note.run_id != self._run_id:
                raise JoinError(f"a host serves the job {note.run_id!r}, not {self._run_id!r} (--rdzv-id)")
        if found:
            return self._of(found)
        if self._served.place == 0:
            _register(self._served.store, self._me, 0)
            return self._found()
        if stores and stores[0] is not None:  # the first host answers, and knows of no job yet
            in_threads([partial(self._register_at, stores[0])])
        return None

    def _register_at(self, store: TCPStore) -> None:
        try:
            _register(store, self._me, self._served.place)
            self._seen = int(store.add(_COUNT, 0))
        except RuntimeError:  # the first host is lost; the next look finds out
            self._seen = 0

    def _of(self, notes: list[JobNote]) -> Job:
        """The job that has gone on the longest, with all contacts that its hosts know."""
        note = max(notes, key=lambda each: each.number)
        contacts = dict.fromkeys(address for each in notes if each.job == note.job for address in each.contacts)
        token = self._token if not note.token else bytes.fromhex(note.token)
        if token is None:
            raise JoinError(f"the hosts of this job were given a {TOKEN}; set the same one here")
        given = self._token if self._token is not None else token
        if fingerprint(token, note.job) != note.check or given != token:
            raise JoinError(f"{TOKEN} is not the one that the other hosts of this job were given")
        founder = note.founders.member(self._me.name, self._me.incarnation) is not None
        return Job(replace(note, contacts=tuple(contacts)), token, founder)

    def _found(self) -> Job | None:
        """On the first host: found the job if those that have come, and are still there, are enough."""
        hosts = _registered(self._served.store)
        self._seen = len(hosts)
        fewest, most = self._sizes
        now = time.monotonic()
        self._enough_since = None if len(hosts) < fewest else self._enough_since or now
        if self._enough_since is None or (len(hosts) < most and now - self._enough_since < self._last_call_s):
            return None
        hosts = [each for each in hosts if each.name == self._me.name or _answers(each.address)]
        if len(hosts) < fewest:
            self._enough_since = None
            return None
        epoch = Epoch.first(hosts[:most])
        token = self._token or secrets.token_bytes(32)
        job = secrets.token_hex(8)
        note = JobNote(
            run_id=self._run_id,
            job=job,
            founders=epoch,
            number=1,
            contacts=tuple(each.address for each in epoch.members),
            token="" if self._token else token.hex(),
            check=fingerprint(token, job),
        )
        return Job(note, token, founder=True)

    def _missing(self, waited_s: float) -> str:
        first = self._addresses[0]
        if self._served.place == 0:
            fewest, _ = self._sizes
            return f"{self._seen} of {fewest} hosts have come within {waited_s:g} s"
        came = f"{self._seen} hosts have come" if self._seen else f"{first} does not answer"
        return f"no host knows a job after {waited_s:g} s, and only {first} founds one ({came})"


def token_of_the_user() -> bytes | None:
    """What is in `TOKEN`; None if nothing is.

    Raises:
        ValueError: it is too short.
    """
    text = os.environ.get(TOKEN, "")
    if text and len(text.encode()) < 16:
        raise ValueError(f"{TOKEN}: {len(text.encode())} bytes, at least 16 are needed")
    return text.encode() or None


def _register(store: TCPStore, me: Member, place: int | None) -> None:
    """Write this host into the list of those that have come, once for each life of the first host's store."""
    mine = f"{_FOUNDER}-named/{me.name}"
    if not store.check([mine]):
        count = store.add(_COUNT, 1)
        store.set(f"{_FOUNDER}/{count}", json.dumps([me.name, me.address, me.payload, place]))
        store.set(mine, "1")


def _registered(store: TCPStore) -> list[Member]:
    """Those that have come, in the order of the list of hosts, then those that are not in it, as they came."""
    found: dict[str, tuple[float, Member]] = {}
    for count in range(1, int(store.add(_COUNT, 0)) + 1):
        key = f"{_FOUNDER}/{count}"
        if not store.check([key]):
            continue  # it is about to be written
        try:
            name, address, payload, place = json.loads(store.get(key))
            checked_argument("name", name, MAX_NAME)
            checked_argument("address", address, MAX_ADDRESS)
            checked_argument("store", store_in(payload), MAX_ADDRESS)
            member = Member(name, 0, address, payload, seats=tuple(range(ranks_in(payload))))
            found[name] = math.inf if place is None else float(place), member
        except (ValueError, TypeError):
            continue  # of something else that writes to this port
    return [member for _, member in sorted(found.values(), key=lambda each: each[0])]


def _answers(address: str) -> bool:
    """Whether the agent that a host has registered is still there: its launcher may have been killed since."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
        return True
    except (OSError, ValueError):
        return False
