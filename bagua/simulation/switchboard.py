"""A process group between ranks that take turns in one process, with the methods that `bagua.comm` calls."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from bagua.comm.groups import Group
from bagua.comm.team import Team
from bagua.simulation.turns import Turns

__all__ = ["LocalGroup", "LocalTeam", "Switchboard"]


class _Work:
    """What `.wait()` waits for."""

    def __init__(self, finish: Any = None) -> None:
        self._finish = finish

    def wait(self) -> bool:
        if self._finish is not None:
            self._finish()
        return True


@dataclass(eq=False)
class Switchboard:
    """What is on its way between the ranks of one group."""

    turns: Turns
    ranks: tuple[int, ...]
    mail: dict[tuple[int, int, int], deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))
    rounds: dict[int, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))


class LocalGroup:
    """One rank's end of a switchboard. Sums run in rank order, so results do not depend on timing."""

    def __init__(self, board: Switchboard, rank: int) -> None:
        self._board, self._rank = board, rank
        self._round = 0

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> _Work:
        """Put a copy into the receiver's mail."""
        self._board.mail[self._rank, dst, tag].append(tensors[0].clone())
        return _Work()

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> _Work:
        """Take the next message of `src` when waited for."""
        box = self._board.mail[src, self._rank, tag]

        def finish() -> None:
            self._wait(lambda: bool(box), f"a message from rank {self._board.ranks[src]}")
            tensors[0].copy_(box.popleft())

        return _Work(finish)

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Work:
        """Reduce in place."""
        parts = self._all(tensors[0])
        tensors[0].copy_(_reduce(parts, options.reduceOp))
        return _Work()

    def reduce(self, tensors: Sequence[Tensor], options: Any) -> _Work:
        """Reduce to the root."""
        parts = self._all(tensors[0])
        if self._rank == options.rootRank:
            tensors[0].copy_(_reduce(parts, options.reduceOp))
        return _Work()

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> _Work:
        """Take the root's."""
        tensors[0].copy_(self._all(tensors[0])[options.rootRank])
        return _Work()

    def _all(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor of this round, by rank."""
        number, size = self._round, len(self._board.ranks)
        self._round += 1
        present = self._board.rounds[number]
        present[self._rank] = x.clone()
        self._wait(lambda: len(present) == size, f"all ranks to join collective {number}")
        self._board.rounds.pop(number - 2, None)  # everyone has come to round number - 1, hence read that one
        return [present[rank] for rank in range(size)]

    def _wait(self, ready: Any, what: str) -> None:
        self._board.turns.wait_for(self._board.ranks[self._rank], ready, what)


def _reduce(parts: Sequence[Tensor], op: Any) -> Tensor:
    if op == ReduceOp.SUM:
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        return total
    # `options.reduceOp` equals a constant only if it stands on the left, and `in` puts it on the right.
    if op == ReduceOp.MIN:
        return torch.stack(list(parts)).amin(0)
    if op == ReduceOp.MAX:
        return torch.stack(list(parts)).amax(0)
    raise ValueError(f"the simulator has no reduction {op}")


@dataclass(eq=False)
class LocalTeam(Team):
    """A team whose ranks take turns; all of them share `boards`."""

    turns: Turns = field(default_factory=lambda: Turns(1))
    boards: dict[str, Switchboard] = field(default_factory=dict)

    def _group(self, name: str, ranks: tuple[int, ...], **how: Any) -> Group:
        rank = ranks.index(self.rank)
        if len(ranks) == 1:
            return Group(None, rank, 1, ranks, self.backend)
        board = self.boards.setdefault(name, Switchboard(self.turns, ranks))
        return Group(LocalGroup(board, rank), rank, len(ranks), ranks, self.backend)

    def _wait(self, keys: list[str], what: str, deadline: float, alert: Any = None) -> None:
        self.turns.wait_for(self.rank, lambda: self.store.check(keys), what)
