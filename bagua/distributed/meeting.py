"""What a launcher says while it waits for the other nodes of its job in torch's rendezvous, and if that fails."""

from __future__ import annotations

import io
import pickle
import signal
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)
from torch.distributed.run import get_rdzv_endpoint

from bagua.distributed import failover
from bagua.distributed.node_counts import parse_nnodes
from bagua.own_address import is_own

__all__ = ["FAILURES", "Meeting", "MeetingError"]

FAILURES = (DistError, RendezvousError)
_TELL_S = 10.0  # of silence
_PROBE_S = 2.0
_NAMES_S = 60.0  # for a name to resolve: a scheduler may enter a node's only once that has started
_LOOK_S = 1.0
_STATIC_S, _JOIN_S, _LAST_CALL_S, _READ_S = 900, 600, 30, 60  # torch's defaults
_PORT = 29500
_DATES = frozenset({"datetime", "timezone", "timedelta"})


class MeetingError(Exception):
    """The nodes cannot meet; says what to check."""


@dataclass(frozen=True)
class Meeting:
    """Where the nodes of a job meet, and for how long they wait for each other.

    Attributes:
        option: that names the place.
        endpoint: of `--rdzv-endpoint`.
        places: (host, port) each; several if the store can move.
        nodes: fewest and most.
        static: numbered by the user, else as they come.
        run_id: of the job.
        conf: of `--rdzv-conf`.
        signals: that torch handles once it starts ranks.
    """

    option: str
    endpoint: str
    places: tuple[tuple[str, int], ...]
    nodes: tuple[int, int]
    static: bool
    run_id: str
    conf: Mapping[str, str]
    signals: tuple[signal.Signals, ...]

    @classmethod
    def of(cls, args: Namespace) -> Meeting | None:
        """What the flags say; None: this node is alone, or the rendezvous is none of torch's own over TCP.

        Raises:
            ValueError: names the flag that is malformed.
        """
        fewest, most = parse_nnodes(args.nnodes)
        static, conf = args.rdzv_backend == "static", _parse_rendezvous_config(args.rdzv_conf)
        elected = args.rdzv_backend == failover.BACKEND
        alone = args.standalone or (static and most == 1 and not args.rdzv_endpoint and args.master_port is None)
        if alone or not (static or elected or args.rdzv_backend == "c10d") or conf.get("store_type", "tcp") != "tcp":
            return None
        option = "--rdzv-endpoint" if args.rdzv_endpoint or not static else "--master-addr"
        if elected:
            places = tuple(failover.parse_endpoints(args.rdzv_endpoint))
        elif option == "--master-addr":
            places = ((args.master_addr.strip("[]"), _PORT if args.master_port is None else args.master_port),)
        else:
            endpoint = get_rdzv_endpoint(args)
            try:
                places = (parse_rendezvous_endpoint(endpoint, -1 if static else DEFAULT_PORT),)
            except ValueError as error:
                raise ValueError(f"--rdzv-endpoint: {error}") from None
            if places[0][1] < 0:
                raise ValueError(f"--rdzv-endpoint: {endpoint!r} is not HOST:PORT")
        names = [name.strip() for name in args.signals_to_handle.split(",")]
        signals = tuple(signal.Signals[name] for name in names if name in signal.Signals.__members__)
        return cls(option, args.rdzv_endpoint or "", places, (fewest, most), static, args.rdzv_id, conf, signals)

    def resolve(self, say: Callable[[str], None]) -> None:
        """Return when a host's name resolves.

        Args:
            say: called at once with those that do not.

        Raises:
            MeetingError: none does, for as long as `--rdzv-conf` says, or a minute.
        """
        key = "timeout" if self.static else "read_timeout" if len(self.places) == 1 else "join_timeout"
        limit_s = self._seconds(key, _NAMES_S) if key in self.conf else _NAMES_S
        deadline, told = time.monotonic() + limit_s, False
        while problems := [problem for host, _ in self.places if (problem := _unresolved(host))]:
            what = f"{self.option} {', '.join(problems)}"
            if len(problems) < len(self.places):
                say(what)
                return
            if time.monotonic() >= deadline:
                raise MeetingError(what)
            if not told:
                say(f"{what}; trying again for {limit_s:g} s (--rdzv-conf {key}=...)")
                told = True
            time.sleep(_LOOK_S)

    def serves_here(self) -> bool | None:
        """Whether this host has to serve the store of a c10d rendezvous, as torch's guess by its name may be wrong.

        None: torch knows, or the user has said it.
        """
        host, port = self.places[0]
        if "is_host" in self.conf:
            return None
        try:
            if _matches_machine_hostname(host):
                return None
        except OSError:  # its own name does not resolve
            pass
        return is_own(host) and not _answers(host, port)  # another launcher of this host may serve it

    @contextmanager
    def told(self, say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
        """Until the block ends or ranks are started, say once that this node waits, and for what.

        That torch has started ranks is seen by its signal handlers. Outside the main thread there are none, and nothing
        is said.

        Yields:
            Whether ranks have been started.
        """
        handlers = {number: signal.getsignal(number) for number in self.signals}
        over = threading.Event()

        def started() -> bool:
            return any(signal.getsignal(number) != handler for number, handler in handlers.items())

        def watch() -> None:
            if not over.wait(_TELL_S) and not started():
                text = self.describe()
                if not over.is_set() and not started():
                    say(text)

        if not handlers or threading.current_thread() is not threading.main_thread():
            yield started
            return
        threading.Thread(target=watch, name="bagua-meeting", daemon=True).start()
        try:
            yield started
        finally:
            over.set()

    def describe(self) -> str:
        """Where this node waits, for how many, how many have come, and until when."""
        silent = [f"{host}:{port}" for host, port in self.places if not _answers(host, port)]
        came = self._came() if len(silent) < len(self.places) else None
        notes = [f"{came} came"] if came is not None else []
        notes += [f"no answer from {', '.join(silent)}"] if silent else []
        told = f" ({'; '.join(notes)})" if notes else ""
        waits = f"waiting at {self._where} for {self._wanted}{told}"
        if came is not None and came >= self.nodes[0]:
            limit_s = self._seconds("last_call_timeout", _LAST_CALL_S)
            return f"{waits}; starting with these after {limit_s:g} s (--rdzv-conf last_call_timeout=...)"
        if self.static:
            key, default = "timeout", _STATIC_S
        elif len(self.places) == 1 and silent:
            key, default = "read_timeout", _READ_S
        else:
            key, default = "join_timeout", _JOIN_S
        return f"{waits}; giving up after {self._seconds(key, default):g} s (--rdzv-conf {key}=...)"

    def explain(self, error: BaseException, started: bool) -> str:
        """One line on what of `FAILURES` has happened, and what to check.

        Args:
            error: one of `FAILURES`.
            started: ranks were started before.
        """
        text = str(error.__cause__ or error).strip().split("\n", 1)[0].rstrip(".")
        told = f" ({text})" if text else ""
        if isinstance(error, RendezvousClosedError):
            return f"the job at {self._where} has ended on another node, or an earlier one had the same --rdzv-id{told}"
        if "EADDRINUSE" in text:
            return f"{self._where}: the port is in use on this host; choose another{told}"
        if started:
            return f"lost the store of the rendezvous at {self._where}{told}; its host has ended or cannot be reached"
        if isinstance(error, RendezvousTimeoutError) or "waiting for clients" in text or "wait timeout" in text:
            same = f"{self.option} and {'--master-port' if self.option == '--master-addr' else '--rdzv-id'}"
            return (
                f"{self._wanted} did not meet at {self._where} in time{told}; start the launcher on each of them with "
                f"the same --nnodes, {same}"
            )
        if isinstance(error, RendezvousConnectionError | DistError):
            return (
                f"no connection to {self._where}{told}; check that the launcher runs on that host, and that its port "
                "can be reached from this one"
            )
        return f"the nodes cannot meet at {self._where}: {type(error).__name__}{told}"

    @property
    def _where(self) -> str:
        return f"{', '.join(f'{host}:{port}' for host, port in self.places)} ({self.option})"

    @property
    def _wanted(self) -> str:
        fewest, most = (self.nodes[1], self.nodes[1]) if self.static else self.nodes
        return f"{fewest} {'node' if most == 1 else 'nodes'}" if fewest == most else f"{fewest} to {most} nodes"

    def _seconds(self, key: str, default: float) -> float:
        try:
            return float(self.conf.get(key, default))
        except ValueError:  # torch refuses it
            return default

    def _came(self) -> int | None:
        """Number of nodes that have come; None: it cannot be known."""
        if self.static:
            return None
        place = self.places[0], self.run_id
        if len(self.places) > 1:
            place = failover.meeting_place(self.endpoint, self.run_id)
        if place is None:
            return None
        (host, port), name = place
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_PROBE_S))
            state = C10dRendezvousBackend(store, name).get_state()
            return 0 if state is None else len(_StateReader(io.BytesIO(state[0])).load().participants)
        except Exception:  # what a damaged pickle raises is not limited
            return None


class _StateReader(pickle.Unpickler):
    """Reads the state of torch's rendezvous, which is a pickle, and makes nothing else of what it finds."""

    def find_class(self, module: str, name: str) -> Any:
        """A class of such a state.

        Raises:
            UnpicklingError: it is none.
        """
        known = {"_RendezvousState", "_NodeDesc"} if module == dynamic_rendezvous.__name__ else _DATES
        if module not in (dynamic_rendezvous.__name__, "datetime") or name not in known:
            raise pickle.UnpicklingError(f"{module}.{name} in the state of the rendezvous")
        return super().find_class(module, name)


def _unresolved(host: str) -> str:
    try:
        socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return f"{host}: the name does not resolve on this host ({why})"
    return ""


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except (OSError, UnicodeError):
        return False
    return True
