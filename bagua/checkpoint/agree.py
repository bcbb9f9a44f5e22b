"""Agreement of the ranks on a checkpoint: which items are equal, and whether a rank failed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bagua.checkpoint.errors import CheckpointError
from bagua.checkpoint.items import Item
from bagua.comm.store_team import decode_alike, encode
from bagua.comm.team import Team
from bagua.errors import RankMismatchError

__all__ = ["agree", "agree_on", "share", "team_of"]

T = TypeVar("T")


def team_of(process_group: Any) -> Team:
    """The ranks that write or read together; one alone if `torch.distributed` is not in use.

    Args:
        process_group: a `ProcessGroup`, a one-dimensional `DeviceMesh`, or None for the default group.
    """
    if process_group is None and not dist.is_initialized():
        return Team(0, 1, None, timedelta(0))
    try:
        return Team.of(process_group, torch.device("cpu"))
    except ValueError:
        if not torch.cuda.is_available():
            raise
        return Team.of(process_group, torch.device("cuda"))  # a group of GPUs only; nothing is sent over it


def agree(team: Team, what: str, report: Any, problem: BaseException | None) -> list[Any]:
    """Exchange reports; all ranks raise if one of them has a problem. Collective.

    Returns:
        The reports, by rank.

    Raises:
        CheckpointError: names the first rank with a problem, and the problem.
        RankMismatchError: a rank is in another call.
        CommunicationError: a rank did not arrive within the timeout.
    """
    said = None if problem is None else f"{type(problem).__name__}: {problem}"
    ours = {"report": report, "problem": said}
    messages = decode_alike(what, team.all_gather_bytes(what, encode(ours)), ours)
    for rank, message in enumerate(messages):
        if message["problem"] is not None:
            raise CheckpointError(f"{what}: rank {rank} of {team.size}: {message['problem']}") from problem
    return [message["report"] for message in messages]


def agree_on(team: Team, what: str, work: Callable[[], T], alike: Mapping[str, str] | None = None) -> T:
    """Do `work()` on each rank; all ranks raise if it failed on one of them. Collective.

    Args:
        alike: arguments that must be the same on all ranks, as text, by name.

    Raises:
        CheckpointError: another rank failed, or has been given other arguments; names it.
        CommunicationError: a rank did not arrive within the timeout.
        whatever `work` raises, on the rank where it does.
    """
    result: Any = None
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:  # the other ranks must hear of it
        problem = error
    try:
        reports = agree(team, what, dict(alike or {}), problem)
    except (CheckpointError, RankMismatchError):
        if problem is None:
            raise
        raise problem from None
    for rank, report in enumerate(reports):
        for name, value in report.items():
            if value != reports[0].get(name):
                raise CheckpointError(f"{what}: {name} is {reports[0].get(name)} on rank 0 and {value} on rank {rank}")
    return result


def share(team: Team, what: str, items: dict[str, Item], problem: BaseException | None) -> dict[str, list[int]]:
    """Find out which items are the same, to the last bit, on several ranks. Collective.

    Returns:
        For each item, by rank: whose copy stands for this rank's; 0, or the rank itself.

    Raises:
        CheckpointError: a rank has a problem, or ranks hold other items than rank 0.
    """
    digests: dict[str, str] = {}
    if problem is None:
        try:
            digests = {name: _digest(item) if team.size > 1 else "" for name, item in items.items()}
        except Exception as error:  # not plain enough to be saved: the other ranks must hear of it
            problem = error
    reports = agree(team, what, digests, problem)
    for rank, report in enumerate(reports):
        if report.keys() != reports[0].keys():
            different = sorted(report.keys() ^ reports[0].keys())
            raise CheckpointError(f"{what}: rank {rank} and rank 0 differ in whether they hold {', '.join(different)}")
    return {
        name: [0 if report[name] == reports[0][name] else rank for rank, report in enumerate(reports)] for name in items
    }


class _Sink:
    """A file that keeps nothing but a hash."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Nothing to do."""


def _digest(item: Item) -> str:
    sink = _Sink()
    torch.save([item.kind, item.value], sink)  # pyright: ignore[reportArgumentType]
    return sink.hash.hexdigest()
