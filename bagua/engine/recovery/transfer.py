"""Hands the weights to a host that joins a running job, beside training."""

from __future__ import annotations

import base64
import copy
import hashlib
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bagua.comm.groups import Group
from bagua.comm.node_keys import site_of
from bagua.comm.own_threads import start_thread
from bagua.comm.remote_store import connect_store
from bagua.comm.store import BoundedStore
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.engine.engine import Engine
from bagua.engine.recovery.differences import replicate_differences
from bagua.engine.recovery.interruptible import run_interruptibly
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.recovery.old_keys import delete_below, prefix_of_weights
from bagua.engine.startup.broadcast import replicate_optimizers
from bagua.errors import CommunicationError, RankMismatchError

__all__ = ["Arrivals", "Fetched", "WeightServer", "fetch_weights", "fingerprint"]

_POLL_S = 0.05
_WHAT = "fetching the weights of a running job"
_log = logging.getLogger("bagua")


@dataclass
class _Weights:
    """Tensors of one rank and the state of its optimizers.

    Attributes:
        params: trainable and frozen parameters by name.
        optimizers: optimizers, or what has their `param_groups` and `state`.
    """

    params: dict[str, nn.Parameter]
    buffers: list[Tensor]
    optimizers: list[Any]
    device: torch.device

    @classmethod
    def of(cls, engine: Engine) -> _Weights:
        """Those in use."""
        inventory = engine.inventory
        params = {**inventory.parameters, **inventory.frozen}
        return cls(params, list(inventory.buffers.values()), list(engine.optimizers), inventory.device)

    @torch.no_grad()
    def copy(self) -> _Weights:
        """A copy that training does not change."""
        params = {name: nn.Parameter(p.detach().clone(), requires_grad=False) for name, p in self.params.items()}
        twin = {id(self.params[name]): param for name, param in params.items()}
        optimizers: list[Any] = []
        for optimizer in self.optimizers:
            groups = [
                {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": []}
                for group in optimizer.param_groups
            ]
            for group, made in zip(optimizer.param_groups, groups, strict=True):
                made["params"] = [twin[id(p)] for p in group["params"] if id(p) in twin]
            state = {twin[id(p)]: copy.deepcopy(each) for p, each in optimizer.state.items() if id(p) in twin}
            optimizers.append(SimpleNamespace(param_groups=groups, state=state))
        return _Weights(params, [buffer.detach().clone() for buffer in self.buffers], optimizers, self.device)

    def transfer(self, team: Team, most: float) -> int | None:
        """From rank 0 of `team` to its rank 1, which may hold a part of them already.

        Args:
            most: share of the weights' bytes. If more differ, nothing changes.

        Returns:
            bytes that differed, and were sent; None if too many.

        Raises:
            RuntimeError: the other one is gone.
        """
        groups = team.open("weights")
        sent: list[int | None] = []

        def give(tensors: Sequence[Tensor], group: Group, device: torch.device, src: int = 0) -> None:
            sent.append(replicate_differences(tensors, group, device, src, threads=1))

        def replicate() -> None:
            tensors = [*self.params.values(), *self.buffers]
            sent.append(replicate_differences(tensors, groups.world, self.device, most=most, threads=1))
            if sent[0] is not None:
                replicate_optimizers(self.optimizers, self.params, team, groups.world, self.device, replicate=give)

        assert team.alert is not None
        try:
            run_interruptibly(groups, replicate, team.alert)
        finally:
            groups.leave(abort=True)
        return None if sent[0] is None else sum(each or 0 for each in sent)


class WeightServer:
    """Gives the weights to one host that joins. Waits for its request, and sends, in a thread of its own.

    The training thread makes the copy, between two steps: call `offer` before each.

    Args:
        learner: name of the host that joins.
        store: host:port of the store in which both meet.
        timeout_s: for one transfer.
        stopped: set when nobody is to be served any more.

    Attributes:
        wanted: whether the host still waits, and this rank is to serve it.
        over: it does not wait any more.
    """

    def __init__(self, learner: str, store: str, timeout_s: float, stopped: threading.Event) -> None:
        self.wanted, self.over = True, False
        self._learner, self._address, self._timeout_s, self._stopped = learner, store, timeout_s, stopped
        self._asked, self._given = threading.Event(), threading.Event()
        self._weights: tuple[_Weights, dict[str, Any]] | None = None
        self._requests: BoundedStore | None = None  # once it is connected
        self._served: set[str] = set()  # requests
        self._thread = start_thread(self._run, "bagua-weights", stopped.set)

    @property
    def ended(self) -> bool:
        """Whether the host has the weights, or waits no more."""
        return not self._thread.is_alive()

    def offer(self, engine: Engine, epoch: int, manager: RecoveryManager) -> None:
        """Between two steps: take a copy for the host, if it has asked for one."""
        if self._asked.is_set() and not self._given.is_set():
            about = {
                "epoch": epoch,
                "round": manager.round,
                "step": engine.step,
                "fingerprint": fingerprint(engine),
                "progress": base64.b85encode(manager.progress.report()).decode("ascii"),
            }
            self._weights = _Weights.of(engine).copy(), about
            self._given.set()

    def _waited_for(self) -> bool:
        return self.wanted and not self._stopped.is_set()

    def _run(self) -> None:
        try:
            self._serve()
        except RuntimeError as error:
            if self._waited_for():
                _log.warning("recovery: no more weights for %s: %s", self._learner, error)
        finally:
            with suppress(RuntimeError):
                self._delete_keys()
            self._requests = None  # it refers to this object: no cycle, which would keep its connection

    def _serve(self) -> None:
        nonce: str | None = ""
        while self._waited_for():
            nonce = self._await_request(nonce)
            if nonce is None:
                return
            self._served.add(nonce)
            self._asked.set()
            while not self._given.wait(_POLL_S):
                if not self._waited_for():
                    return
            assert self._weights is not None
            (weights, about), self._weights = self._weights, None
            self._asked.clear()
            self._given.clear()
            try:
                check = partial(self._check_request, nonce)
                team = _team(0, self._address, self._learner, nonce, self._timeout_s, check)
                wish = decode(team.all_gather_bytes(_WHAT, encode(about))[1])
                sent = weights.transfer(team, float(wish["most"]))
                _log.info(
                    "recovery: %s has been given the weights of step %d: %s bytes of them",
                    self._learner, about["step"], "too many" if sent is None else sent,
                )  # fmt: skip
            except RuntimeError as error:
                _log.warning("recovery: %s could not be given the weights: %s", self._learner, error)

    def _delete_keys(self) -> None:
        """If the host has joined, or is gone. Only this thread deletes them: to read a key that is not there waits."""
        if self.over and self._requests is not None and not self._stopped.is_set():
            prefix = prefix_of_weights(self._learner)
            if self._newest_request() in ("", *self._served):
                delete_below(self._requests, prefix)
            else:  # its next process has asked
                for nonce in self._served:
                    delete_below(self._requests, f"{prefix}/{nonce}")

    def _check(self) -> None:
        if not self._waited_for():
            raise CommunicationError(f"{self._learner} does not wait any more")

    def _check_request(self, nonce: str) -> None:
        """A rank that was killed does not come any more; the one that is started instead asks anew."""
        self._check()
        if self._newest_request() != nonce:
            raise CommunicationError(f"{self._learner} has asked again")

    def _await_request(self, last: str) -> str | None:
        """The next request, which is not `last`; None if the host waits no more."""
        if self._requests is None:
            store = connect_store(self._address, prefix_of_weights(self._learner), self._timeout_s, self._check)
            self._requests = BoundedStore(store, self._timeout_s, alert=self._check)
        while self._waited_for():
            nonce = self._newest_request()
            if nonce not in ("", last):
                return nonce
            time.sleep(_POLL_S)
        return None

    def _newest_request(self) -> str:
        """Of the host; it may be that of a rank that was killed. "" if there is none."""
        store = self._requests
        assert store is not None
        return bytes(store.get("request")).decode("ascii", "replace") if store.check(["request"]) else ""


class Arrivals:
    """Serves the hosts that wait for the weights, on the rank that is to: the first one."""

    def __init__(self, manager: RecoveryManager) -> None:
        self._manager = manager
        self._servers: dict[str, WeightServer] = {}
        self._stopped = threading.Event()
        weakref.finalize(self, self._stopped.set)

    def serve(self, engine: Engine) -> None:
        """Between two steps: begin to serve those that have come, and take copies for those that have asked."""
        view = self._manager.seat.view()
        mine = view is not None and view.rank == 0 and view.group == self._manager.group
        learners = view.learners if view is not None and mine else ()
        if not learners and not self._servers:
            return
        for name, server in self._servers.items():
            server.over = view is not None and name not in view.learners
            server.wanted = name in learners
        self._servers = {name: server for name, server in self._servers.items() if not server.ended}
        assert view is not None
        for name in learners:
            if name not in self._servers:
                timeout_s = self._manager.options.open_timeout_s
                self._servers[name] = WeightServer(name, view.store, timeout_s, self._stopped)
            self._servers[name].offer(engine, view.epoch, self._manager)


@dataclass(frozen=True)
class Fetched:
    """Weights of a running job.

    Attributes:
        epoch: of the member that gave them.
        round, step: after which they were copied.
        progress: how far the user's loop was, see `Progress`.
        nbytes: that this rank did not hold already.
    """

    epoch: int
    round: int
    step: int
    progress: bytes
    nbytes: int


def fetch_weights(
    engine: Engine, learner: str, store: str, timeout_s: float, alert: Callable[[], object], most: float = 1.0
) -> Fetched | None:
    """Overwrite weights and optimizer state of `engine` with those of the job.

    Returns:
        what they are; None if more than `most` of the weights differ. Then `engine` keeps what it has.

    Args:
        learner: name of this host.
        store: host:port of the store of the first member.
        alert: called while it waits; raises if somebody else is the first member now.
        most: share of the bytes of the weights.

    Raises:
        RuntimeError: the member that sent them is lost, or `alert` has raised. The weights are then no model's.
        RankMismatchError: the job trains another module than this rank, or with other options.
    """
    nonce = secrets.token_hex(8)
    requests = BoundedStore(connect_store(store, prefix_of_weights(learner), timeout_s, alert), timeout_s, alert=alert)
    requests.set("request", nonce)
    team = _team(1, store, learner, nonce, timeout_s, alert)
    told = decode(team.all_gather_bytes(_WHAT, encode({"most": most}))[0])
    if told["fingerprint"] != fingerprint(engine):
        raise RankMismatchError(
            f"{learner}: the job trains another module than this rank, or with other options of bagua.distribute()"
        )
    sent = _Weights.of(engine).transfer(team, most)
    if sent is None:
        return None
    progress = base64.b85decode(told["progress"])
    return Fetched(int(told["epoch"]), int(told["round"]), int(told["step"]), progress, sent)


def fingerprint(engine: Engine) -> str:
    """Equal for engines that train the same module with the same options."""
    options = repr(replace(engine.config, lanes_of_sums=None, straight_chunk_bytes=0, bdp_bytes=0))
    recovery = engine.failures.recovery
    given = recovery.algorithm if recovery is not None else None
    algorithm = repr(given or engine.state.root)  # the latter is fitted to the nodes, of which a newcomer has one
    sites = bool(site_of(engine.team.node))  # all ranks have one, or none: else a newcomer has to leave
    backend = recovery.options.backend if recovery is not None else None
    return hashlib.sha256(encode([engine.inventory.signature(), algorithm, options, sites, backend])).hexdigest()


def _team(rank: int, store: str, learner: str, nonce: str, timeout_s: float, alert: Callable[[], object]) -> Team:
    meeting = connect_store(store, f"{prefix_of_weights(learner)}/{nonce}", timeout_s, alert)
    return Team(rank, 2, meeting, timedelta(seconds=timeout_s), "gloo", f"weights of {learner}", node="", alert=alert)
