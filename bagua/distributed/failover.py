"""Rendezvous that survives the loss of the host of its store: `--rdzv-endpoint a:29400,b:29400,c:29400`.

torch's c10d rendezvous keeps its state in a store on one host, and all launchers end when that host does. Here every
host of the list serves a store as long as its launcher lives, and one of them is in use: the leader's. Each launcher
notes in its own store which host leads in which term. If the leader is gone, or came back with an empty store, the
next term begins: its leader is the first host of the list that answers, other than the one that was lost. A host that
comes, or comes back, asks the others and joins the highest term. The first term is led by the first host.

Where this ends: if the network falls in two parts, each may continue by itself; set the lower limit of `--nnodes` above
half of the hosts, so that at most one part can. Only hosts of the list can lead; others may take part.
"""

from __future__ import annotations

import errno
import json
import logging
import random
import socket
import sys
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

__all__ = ["BACKEND", "Endpoints", "FailoverRendezvous", "meeting_place", "parse_endpoints", "register"]

BACKEND = "bagua-c10d"
_KEY = "bagua/term"
_PROBE_S = 2.0  # for a host to answer
_POLL_S = (0.2, 0.6)  # between two looks at the hosts
_LOOKS = 2  # in a row without an answer, until a host takes the lead
_BEATS = 3  # torch's heartbeats can be almost two intervals apart
_HERE_S = 15.0  # for all hosts of a rendezvous to confirm that they start from it
_HERE = "bagua/here"
_log = logging.getLogger("bagua")
_endpoints: dict[tuple[str, str], Endpoints] = {}

Term = tuple[int, int]  # number of the term, index of the host that leads


def register() -> None:
    """Make the rendezvous known to torch as `BACKEND`. Repeated calls are free."""
    if BACKEND not in rendezvous_handler_registry._registry:
        rendezvous_handler_registry.register(BACKEND, FailoverRendezvous)


def parse_endpoints(text: str) -> list[tuple[str, int]]:
    """`host:port,host:port` as pairs.

    Raises:
        ValueError: names the one that is malformed, or given twice.
    """
    found: list[tuple[str, int]] = []
    for word in text.split(","):
        host, _, port = word.strip().rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"--rdzv-endpoint: {word.strip()!r} is not HOST:PORT")
        if (host.strip("[]"), int(port)) in found:
            raise ValueError(f"--rdzv-endpoint: {word.strip()!r} is listed twice")
        found.append((host.strip("[]"), int(port)))
    return found


def meeting_place(text: str, run_id: str) -> tuple[tuple[str, int], str] | None:
    """(host, port) of the store in use and the name of the rendezvous in it, as this process knows; None: not yet."""
    found = _endpoints.get((text, run_id))
    if found is None or found.term is None:
        return None
    return parse_endpoints(text)[found.term[1]], _name(run_id, found.term)


class Endpoints:
    """The hosts that may lead, the store that this launcher serves, and who leads.

    Args:
        hosts: (host, port) each.
        run_id: of the job; hosts of another job are refused.
    """

    def __init__(self, hosts: list[tuple[str, int]], run_id: str) -> None:
        self._hosts, self._run_id = hosts, run_id
        self.mine, self._server = self._serve()
        self._known: Term | None = None

    @classmethod
    def of(cls, text: str, run_id: str) -> Endpoints:
        """Those of this process: a second agent in it finds the store that the first one served."""
        key = text, run_id
        if key not in _endpoints:
            _endpoints[key] = cls(parse_endpoints(text), run_id)
        return _endpoints[key]

    @property
    def term(self) -> Term | None:
        """The highest that this process knows."""
        return self._known

    def find(self, deadline: float) -> tuple[Term, TCPStore]:
        """The term that is on, and a connection to its leader's store.

        Raises:
            RendezvousTimeoutError: there was none by `deadline` (`time.monotonic`).
        """
        missed: dict[Term, int] = {}  # looks in which the leader of a term was not there
        while True:
            stores = [self._connect(at) for at in range(len(self._hosts))]
            views = [None if store is None else self._read(store) for store in stores]
            noted = [term for view in (*views, (self._known, None)) for term in view or () if term is not None]
            best = max(noted, key=_age) if noted else None
            if best is None:
                if self.mine == 0:
                    self._lead((1, 0))
            else:
                leader, view = stores[best[1]], views[best[1]]
                if leader is not None and view is not None and view[1] == best:
                    self._note(best)
                    return best, leader
                missed[best] = missed.get(best, 0) + 1
                able = [at for at, store in enumerate(stores) if store is not None and at != best[1]]
                if missed[best] >= _LOOKS and self.mine is not None and able[:1] == [self.mine]:
                    self._lead((best[0] + 1, self.mine))
                    continue
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"none of {self._hosts} serves the rendezvous {self._run_id!r}")
            time.sleep(random.uniform(*_POLL_S))

    def _lead(self, term: Term) -> None:
        assert self._server is not None
        _log.info("rendezvous: this host (%d of the list) leads term %d", term[1], term[0])
        self._known = term
        _write(self._server, self._run_id, term, term)

    def _note(self, term: Term) -> None:
        self._known = term
        if self._server is not None and term[1] != self.mine:
            _write(self._server, self._run_id, term, None)

    def _serve(self) -> tuple[int | None, TCPStore | None]:
        """Serve a store at the first address of the list that is this machine's and free."""
        for at, (host, port) in enumerate(self._hosts):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, port))
                listener.listen(1024)
            except OSError as error:
                listener.close()
                if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE) or isinstance(error, socket.gaierror):
                    continue
                raise
            if (problem := unreachable(host, listener.getsockname()[0])) is not None:
                _log.warning("rendezvous: %s", problem)
            store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
                timeout=timedelta(seconds=30),
            )  # fmt: skip
            return at, store
        return None, None

    def _connect(self, at: int) -> TCPStore | None:
        """A connection to a host's store; None if it does not answer. The first look costs no store client."""
        host, port = self._hosts[at]
        try:
            socket.create_connection((host, port), timeout=_PROBE_S).close()
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        except (OSError, RuntimeError):
            return None

    def _read(self, store: TCPStore) -> tuple[Term | None, Term | None] | None:
        """What a host has noted: the highest term that it knows, the term that it leads. None: it cannot be asked.

        Raises:
            RendezvousClosedError: it belongs to another job.
        """
        try:
            if not store.check([_KEY]):
                return None, None
            data = json.loads(store.get(_KEY))
            terms = [None if each is None else (int(each[0]), int(each[1])) for each in (data["known"], data["leads"])]
            if any(term is not None and not 0 <= term[1] < len(self._hosts) for term in terms):
                raise ValueError("a host that is not in the list")
        except (RuntimeError, ValueError, KeyError, TypeError, IndexError) as error:
            _log.debug("rendezvous: a host cannot be asked: %s", error)
            return None
        if data.get("run_id") != self._run_id:
            raise RendezvousClosedError(f"a host serves the rendezvous {data.get('run_id')!r}, not {self._run_id!r}")
        return terms[0], terms[1]


class FailoverRendezvous(RendezvousHandler):
    """torch's dynamic rendezvous, moved to another store when the host of its store is lost.

    Args:
        params: of the launcher; the endpoint is a list.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._params = params
        self._endpoints = Endpoints.of(params.endpoint, params.run_id)
        self._inner: RendezvousHandler | None = None
        self._join_s = float(params.get_as_int("join_timeout", 600) or 600)
        if (attempts := params.get_as_int("keep_alive_max_attempt", 3) or 3) < _BEATS:
            _tell(f"keep_alive_max_attempt={attempts} would count live hosts as dead; use at least {_BEATS}")
        self._hosts = 0  # that took part in the last rendezvous
        self._round = -1  # of the last rendezvous, as torch counts
        self._why = ""

    def get_backend(self) -> str:
        """The name that it is registered under."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Each attempt has a store of its own: the launcher's may be on a host that is lost."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, at whichever host leads. Says on stderr why it takes place, and who came."""
        deadline = time.monotonic() + self._join_s
        if self._hosts:
            _tell(f"{self._why or 'a rank of this host has failed'}; the ranks of this host are started again")
        while True:
            try:
                if self._inner is None:
                    self._inner = self._open(deadline)
                info = self._inner.next_rendezvous()
                if absent := _absent(info):
                    _tell(f"{absent} of {info.world_size} hosts were lost during the rendezvous; starting it again")
                    self._lose("a host that took part in the rendezvous is gone")
                    continue
                self._round = _state_of(self._inner).round
                if info.rank == 0:
                    before = f", {self._hosts} before" if self._hosts else ""
                    _tell(f"{info.world_size} of {self._params.max_nodes} hosts take part{before}")
                self._hosts, self._why = info.world_size, ""
                return info
            except (RendezvousConnectionError, DistError) as error:
                self._lose(error)
                if time.monotonic() > deadline:
                    raise

    def is_closed(self) -> bool:
        """See base class."""
        return self._inner is not None and self._inner.is_closed()

    def set_closed(self) -> None:
        """See base class."""
        if self._inner is not None:
            self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """See base class. Counts as nodes that wait, too, for which all are to meet anew: a lost store; hosts that meet
        without this one, because it counted as dead while it was stopped or cut off.
        """
        if self._inner is None:
            return 1
        try:
            waiting = self._inner.num_nodes_waiting()
        except RendezvousConnectionError as error:
            self._lose(error)
            self._why = "the host that served the rendezvous is lost"
            return 1
        state = _state_of(self._inner)
        if not waiting and not (state.complete and state.round == self._round):
            self._why = "this host was counted as lost"
            return 1
        if waiting:
            self._why = f"{waiting} {'host wants' if waiting == 1 else 'hosts want'} to join"
        return waiting

    def get_run_id(self) -> str:
        """See base class."""
        return self._params.run_id

    def shutdown(self) -> bool:
        """See base class. An agent that has lost the store, or hosts while it met them, may begin again: not for it."""
        if isinstance(sys.exc_info()[1], RendezvousConnectionError | DistError):
            self._lose(sys.exc_info()[1])
            return True
        return self._inner is None or self._inner.shutdown()

    def _open(self, deadline: float) -> RendezvousHandler:
        term, store = self._endpoints.find(deadline)
        _log.info("rendezvous: term %d, led by host %d of the list", *term)
        backend = C10dRendezvousBackend(store, _name(self._params.run_id, term))
        return create_handler(store, backend, self._params)

    def _lose(self, why: object) -> None:
        _log.warning("rendezvous: leaving this round to look for a store that responds (%s)", why)
        inner, self._inner = self._inner, None
        stop: Any = getattr(inner, "_stop_heartbeats", None)
        if stop is not None:
            stop()


def _absent(info: RendezvousInfo) -> int:
    """Number of hosts that joined a rendezvous but do not confirm its result: one may die in between.

    Raises:
        DistError: the store is lost.
    """
    keys = [f"{_HERE}/{rank}" for rank in range(info.world_size)]
    info.store.set(keys[info.rank], "1")
    deadline = time.monotonic() + _HERE_S
    while not info.store.check(keys):
        if time.monotonic() > deadline:
            return sum(not info.store.check([key]) for key in keys)
        time.sleep(_POLL_S[0])
    return 0


def _state_of(handler: RendezvousHandler) -> Any:
    """What the hosts have in common, as torch's handler saw it last."""
    holder: Any = getattr(handler, "_state_holder")  # noqa: B009  (private, and the base class has none)
    return holder.state


def unreachable(host: str, bound: str) -> str | None:
    """A name that /etc/hosts maps to loopback, as some systems do with their own: others could not connect."""
    asked_for = host == "localhost" or host.startswith("127.") or host == "::1"
    if asked_for or not (bound.startswith("127.") or bound == "::1"):
        return None
    return f"{host} is {bound} on this host, which no other can reach; give --rdzv-endpoint its address instead"


def _tell(text: str) -> None:
    print(f"bagua run: {text}", file=sys.stderr, flush=True)


def _write(store: TCPStore, run_id: str, known: Term, leads: Term | None) -> None:
    store.set(_KEY, json.dumps({"run_id": run_id, "known": known, "leads": leads}))


def _name(run_id: str, term: Term) -> str:
    return f"{run_id}.{term[0]}"


def _age(term: Term) -> tuple[int, int]:
    """Of two hosts that lead the same term, the first of the list counts."""
    return term[0], -term[1]
