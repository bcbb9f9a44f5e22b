"""Protocols of buckets, tickets and lanes, as algorithms use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from bagua.comm.groups import Groups

__all__ = ["BackgroundLane", "Ballot", "Bucket", "Gate", "Lane", "QuorumGate", "QuorumLane", "Ticket"]


class Bucket(Protocol):
    """Parameters whose payload lies in one flat tensor, which is exchanged at once."""

    @property
    def index(self) -> int:
        """Position in the order of exchange."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in the order in which they lie in `flat`."""
        ...

    @property
    def params(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters, in the same order."""
        ...

    @property
    def flat(self) -> Tensor:
        """The payload: [N], one dtype; each parameter's gradient (or the parameter itself) is a view of it."""
        ...

    def split(self, flat: Tensor, only: Collection[torch.nn.Parameter] | None = None) -> Sequence[Tensor]:
        """Return each parameter's part of `flat`, a tensor like the payload, in the parameter's shape.

        Args:
            flat: [N], or [M] with the elements of `only`, in the order of the bucket.
            only: parameters of the bucket; None: all.
        """
        ...


class Ticket(Protocol):
    """One launched exchange."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; on a GPU: whether its result may be used without waiting."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The exception, once it is done; None if it succeeded."""
        ...

    def wait(self) -> None:
        """Block until it is done. `Context.wait` also raises and keeps count; prefer it."""
        ...


class Lane(Protocol):
    """A queue that runs exchanges in order."""

    @property
    def groups(self) -> Groups:
        """The lane's own groups."""
        ...


class Gate(Protocol):
    """Where the jobs of a background lane wait for the other ranks."""

    @property
    def over(self) -> bool:
        """Whether no further round will take place, because a rank has left."""
        ...

    @property
    def remark(self) -> str:
        """Why, or which rank is late; "" if there is nothing to say."""
        ...

    @property
    def urgent(self) -> bool:
        """Whether the remark is a warning."""
        ...

    def give_up_after(self, seconds: float) -> None:
        """Raise `CommunicationError` if no round took place for so long because a rank is gone or does not respond."""
        ...

    @property
    def total(self) -> int:
        """Sum of what the ranks have brought to the last round that took place; on the lane's thread."""
        ...

    def enter(self, give_up: Callable[[], bool], number: int = 0) -> bool:
        """Wait, in `before` of a launch, until all ranks have entered this round; returns whether they did.

        False if a rank gave up or has left, and then on all ranks.

        Args:
            give_up: polled; true cancels the round, unless all ranks have entered.
            number: what this rank brings, from 0 to less than 2^47 over all ranks; `total` is the sum.
        """
        ...


class BackgroundLane(Lane, Protocol):
    """A lane that may wait for other ranks without limit, while training continues."""

    @property
    def timeout_s(self) -> float:
        """The process group's."""
        ...

    @property
    def gate(self) -> Gate:
        """Jobs hold it and not the lane, so that the lane of a dropped module can end."""
        ...

    def abandon(self) -> None:
        """Give the lane up after an error; other ranks no longer wait for this one."""
        ...


class Ballot(Protocol):
    """What a rank brings to the rounds of a `QuorumGate`; called on the lane's thread."""

    def ready(self) -> bool:
        """Whether this rank counts towards the quorum."""
        ...

    def offer(self) -> Sequence[float]:
        """Fix what this rank contributes; as many numbers on all ranks, the first one is 0 if it is nothing."""
        ...

    def withdrawn(self) -> bool:
        """Whether to call the round off."""
        ...


class QuorumGate(Gate, Protocol):
    """A gate whose rounds close once a quorum of ranks is ready."""

    def merge(self, ballot: Ballot) -> list[tuple[float, ...]] | None:
        """Wait until the next round closes; all ranks' lanes wait here, also those of ranks that are not ready.

        Returns:
            The offers of all ranks, by position in the lane's groups, the same on all ranks: every rank must take part
            in the exchange. None: the round was called off, or `over`.
        """
        ...


class QuorumLane(BackgroundLane, Protocol):
    """A background lane with a `QuorumGate`."""

    @property
    def gate(self) -> QuorumGate:
        """Jobs hold it and not the lane."""
        ...
