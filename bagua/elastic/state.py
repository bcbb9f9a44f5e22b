"""`State`: training state that is committed to memory, to another host and to disk, and restored."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from bagua.checkpoint.agree import team_of
from bagua.checkpoint.archive import load, steps
from bagua.checkpoint.errors import CheckpointError
from bagua.checkpoint.items import check_objects, collect, kind_of
from bagua.checkpoint.restore import restore
from bagua.elastic.commit import Commit, digest, newest, owners_of, pack, unpack
from bagua.elastic.disk import Disk
from bagua.elastic.following import Following
from bagua.elastic.link import Link
from bagua.elastic.memory_store import MemoryStore
from bagua.elastic.preemption import EXIT_CODE, PreemptionHandler
from bagua.elastic.resize import Resize
from bagua.engine.recovery.step_gate import is_fault_tolerant

__all__ = ["Restored", "State"]

_log = logging.getLogger("bagua")
_SIGNAL_S = 3.0  # how long a rank that need not leave waits for its own SIGTERM when others leave


@dataclass(frozen=True)
class Restored:
    """Result of `State.restore`.

    Attributes:
        number: of the commit; the first one has number 1.
        size: number of ranks that made it.
        source: "memory" or "disk"; "peers" for a rank that has joined a fault-tolerant training.
    """

    number: int
    size: int
    source: str


class State:
    """Training state that survives restarts with the same, more or fewer ranks.

        state = bagua.elastic.State(model, optimizer, sampler, scheduler=scheduler, directory="out/run")
        state.restore()
        for epoch in range(sampler.epoch, 10): ...
            for step, batch in enumerate(sampler.track(loader)): ...
                if step % 20 == 19:
                    state.commit()

    Make it on all ranks, after `bagua.distribute`, in the main thread. A context manager: its end waits for the disk.

    Args:
        model, optimizer: as given to and returned by `bagua.distribute`.
        sampler: a `bagua.elastic.Sampler` or anything with `state_dict` and `load_state_dict` that is equal on all
            ranks and knows positions in the data of all; or None.
        directory: of this training alone, seen by all ranks: for commits on the disk. None for none.
        disk_every: commits between two background writes to `directory`.
        keep: number of checkpoints kept there.
        on_resize: called by `restore` at its end, if the number of ranks has changed; with a fault-tolerant module also
            between two steps.
        grace_s: SIGTERM makes the next `commit` the last; if none comes within this time the rank ends without one.
            Keep it below the launcher's `--shutdown-timeout` (30 s).
        process_group: a `ProcessGroup` or one-dimensional `DeviceMesh`; None for all ranks.
        user: by name, anything that `bagua.checkpoint.save` takes: modules, schedulers, plain data. Plain data is
            read and set as an attribute: `state.best = 0.9`.

    With a fault-tolerant module (docs/fault_tolerance.md) the weights live on in the ranks that are left. `commit` only
    counts then, and `restore` gives a rank that joins the place of the others in the data, their schedulers and plain
    data. A step that is lost changes none of these.

    Raises:
        ValueError, TypeError: an argument is wrong.
        CommunicationError: a rank did not arrive within the timeout.

    Examples:
        >>> with bagua.elastic.State(model, optimizer, best=0.0) as state:
        ...     restored = state.restore()  # None: the first start
        ...     state.best = 0.9
        ...     state.commit()
        >>> state.number
        1
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: Any = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        disk_every: int = 10,
        keep: int = 2,
        on_resize: Callable[[Resize], None] | None = None,
        grace_s: float = 20.0,
        process_group: Any = None,
        **user: Any,
    ) -> None:
        self._user = user
        _check(model, optimizer, sampler, user)
        for name, value in (("disk_every", disk_every), ("keep", keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
        if not grace_s > 0:
            raise ValueError(f"grace_s: expected a number of seconds, got {grace_s!r}")
        self._objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if sampler is not None:
            self._objects["sampler"] = sampler
        self._on_resize = on_resize
        self._number = self._generation = 0
        self._checked = False
        self._preemption: PreemptionHandler | None = None
        self._following: Following | None = None
        if is_fault_tolerant(model):
            for name, value in (("directory", directory), ("process_group", process_group)):
                if value is not None:
                    raise ValueError(f"{name}: not with a fault-tolerant module, whose weights live on in its ranks")
            self._following = Following(model, optimizer, sampler, user, on_resize)
            return
        self._team = team_of(process_group)
        self._link = Link(self._team)
        self._memory = MemoryStore(self._link)
        self._disk = None if directory is None else Disk(self._team, Path(directory), disk_every, keep)
        self._grace_s = grace_s
        if not self._memory.present and self._team.rank == 0:
            _log.warning("elastic: started without `bagua run`: commits outlive the ranks only on disk")

    @property
    def number(self) -> int:
        """Of the last commit."""
        return self._number if self._following is None else self._following.number

    def __getattr__(self, name: str) -> Any:
        user = self.__dict__.get("_user", {})
        if name in user:
            return user[name]
        raise AttributeError(f"State has no {name!r}; pass it to State() as a keyword argument")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_user", {}):
            self._user[name] = value
        else:
            object.__setattr__(self, name, value)

    def __enter__(self) -> State:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(wait=kind is None)

    def commit(self) -> None:
        """Take a commit. Collective: call it on all ranks, between steps.

        After it returns, the failure of any one host loses nothing up to this commit: each part is in the
        memory of its node's launcher, and what only one node had is on another one too. If a rank has got SIGTERM,
        this is the last commit: it goes to the disk as well if there is a directory, and then all ranks leave.

        Raises:
            CheckpointError: the state of a rank cannot be committed; names the rank.
            CommunicationError: the connection to a rank was lost.
            SystemExit: a rank has got SIGTERM; code 143.
        """
        if self._following is not None:
            self._following.number += 1
            return
        what, handler = f"commit {self.number + 1}", self._arm()
        data: dict[str, bytes] = {}
        kinds: dict[str, str] = {}
        problem: Exception | None = None
        try:
            data, kinds = self._pack()
        except Exception as error:  # the other ranks must hear of it
            problem = error
        sums = {name: digest(each) for name, each in data.items()}
        report = {
            "digests": sums,
            "nbytes": {name: len(each) for name, each in data.items()},
            "token": secrets.token_hex(8),
            "preempted": handler.asked,
        }
        reports = self._gather(what, report, problem)
        owners = owners_of([each["digests"] for each in reports])
        commit = Commit(self.number + 1, self._generation, reports[0]["token"], self._team.size, kinds, owners)
        self._memory.store(commit, data, reports, what)
        self._number += 1
        preempted = any(each["preempted"] for each in reports)
        if self._disk is not None and (preempted or self._disk.due(commit.number)):
            self._disk.write(commit, data)
        if preempted:
            self._leave(handler)

    def restore(self) -> Restored | None:
        """Put back the newest commit that the nodes or the disk hold. Collective; call it once, before training.

        Returns:
            what it was; None if there is none, at the first start.

        Raises:
            CheckpointError: something does not go with the number of ranks that there are now, the directory cannot be
                read, or files are damaged.
            CommunicationError: a rank did not arrive within the timeout.
        """
        if self._following is not None:
            place = self._following.restore()
            return None if place is None else Restored(place.number, place.size, "peers")
        slots: list[dict[str, Any]] = []
        on_disk = 0
        problem: Exception | None = None
        try:
            if self._memory.leads:
                slots = self._memory.contents()
            if self._disk is not None and self._team.rank == 0:
                on_disk = max(steps(self._disk.directory), default=0)
        except Exception as error:  # the other ranks must hear of it
            problem = error
        reports = self._gather("restore", {"slots": slots, "disk": on_disk}, problem)
        found = newest([(at, reports[node[0]]["slots"]) for at, node in enumerate(self._link.nodes)])
        generations = [about["generation"] for report in reports for about in report["slots"]]
        self._generation = max(generations, default=0) + 1
        on_disk = reports[0]["disk"]
        if found is None and not on_disk:
            self._arm()
            return None
        if found is not None and found.commit.number >= on_disk:
            objects = {**self._objects, **self._user}
            self._take(restore(self._memory.fetch(found, objects), objects, self._team, rng=True))
            restored = Restored(found.commit.number, found.commit.size, "memory")
        else:
            restored = self._from_disk(on_disk)
        self._number = restored.number
        if restored.size != self._team.size and self._on_resize is not None:
            self._on_resize(Resize(restored.size, self._team.size))
        self._arm()
        return restored

    def close(self, wait: bool = True) -> None:
        """Wait until the disk has what was to be written, and let SIGTERM be what it was. May be called again.

        Args:
            wait: False, after an error, gives up what is being written; the checkpoint before it stays.
        """
        if self._following is not None:
            return
        if wait:  # else something may be in progress, which dropping the connections would wait for
            if self._disk is not None:
                self._disk.wait()
            self._link.close()
        if self._preemption is not None:
            self._preemption.close()
        self._memory.close()

    def _gather(self, what: str, report: dict[str, Any], problem: Exception | None) -> list[dict[str, Any]]:
        """Reports by rank; all ranks raise if one of them has a problem. Collective."""
        said = None if problem is None else f"{type(problem).__name__}: {problem}"
        reports = self._link.gather(what, {**report, "problem": said})
        for rank, each in enumerate(reports):
            if each["problem"] is not None:
                raise CheckpointError(f"{what}: rank {rank} of {self._team.size}: {each['problem']}") from problem
        return reports

    def _pack(self) -> tuple[dict[str, bytes], dict[str, str]]:
        items = collect({**self._objects, **self._user})
        data = {name: pack(item) for name, item in items.items()}
        if not self._checked:
            for name, each in data.items():
                unpack(each, name)
            self._checked = True
        return data, {name: item.kind for name, item in items.items()}

    def _from_disk(self, number: int) -> Restored:
        assert self._disk is not None
        objects = {**self._objects, **self._user}
        loaded = load(self._disk.directory, objects, step=number, process_group=self._team)
        assert loaded is not None
        self._take(loaded.data)
        return Restored(number, loaded.size, "disk")

    def _take(self, data: Mapping[str, Any]) -> None:
        self._user.update({name: value for name, value in data.items() if name in self._user})

    def _arm(self) -> PreemptionHandler:
        """From the first `restore` or `commit` on there is something to lose by a SIGTERM."""
        if self._preemption is None:
            self._preemption = PreemptionHandler(self._grace_s)
        return self._preemption

    def _leave(self, handler: PreemptionHandler) -> None:
        if self._disk is not None:
            self._disk.wait()
        # The agents of other nodes may be about to stop their ranks as well, and a rank that ends by itself before
        # that counts as one that failed.
        handler.wait(_SIGNAL_S)
        _log.info("elastic: rank %d exits after commit %d", self._team.rank, self.number)
        handler.close()
        raise SystemExit(EXIT_CODE)


def _check(model: Any, optimizer: Any, sampler: Any, user: Mapping[str, Any]) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if sampler is not None and kind_of(sampler) != "stateful":
        raise TypeError(f"sampler: {type(sampler).__name__} has no state_dict and load_state_dict; see elastic.Sampler")
    check_objects(user)
    taken = [name for name in user if name.startswith("_") or hasattr(State, name)]
    if taken:
        raise ValueError(f"user: {', '.join(taken)} is reserved by State itself")
