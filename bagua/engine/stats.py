"""Statistics: bytes and seconds of communication, per step and in total."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from bagua.autotune.progress import Progress
from bagua.comm.groups import Meter
from bagua.engine.guard import Quality
from bagua.engine.lanes.lane import Ticket
from bagua.engine.lanes.stream_lane import StreamTicket
from bagua.engine.recovery.change import MembershipChange

__all__ = ["Series", "Stats", "StepStats", "Tally"]


@dataclass(frozen=True)
class StepStats:
    """Communication cost of one step, or of all steps together.

    Attributes:
        bytes_sent: bytes that this rank sent.
        bytes_received: bytes that this rank received.
        payload_bytes: size in memory of the exchanged tensors.
        dense_bytes: bytes that an uncompressed ring all-reduce of the same tensors would send: 2 (R-1)/R of their size.
        comm_s: seconds during which at least one lane was busy.
        exposed_s: seconds during which the training thread waited for communication: with threads (gloo), communication
            without overlap. With NCCL the CPU only enqueues work, so it is near 0: compare the step time with that on
            one rank, or take a profile.
        launches: number of exchanges.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    payload_bytes: int = 0
    dense_bytes: int = 0
    comm_s: float = 0.0
    exposed_s: float = 0.0
    launches: int = 0

    @property
    def compression_ratio(self) -> float:
        """`dense_bytes / bytes_sent`: the saving over an uncompressed ring all-reduce; 1 if nothing was sent."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def bits_per_s(self) -> float:
        """Bits sent per second of `comm_s`."""
        return 8 * self.bytes_sent / self.comm_s if self.comm_s else 0.0

    def to_dict(self) -> dict[str, int | float]:
        """All attributes by name, those that are computed too, which `dataclasses.asdict` leaves out.

        Examples:
            >>> bagua.StepStats(bytes_sent=2, dense_bytes=8).to_dict()["compression_ratio"]
            4.0
        """
        return {**asdict(self), "compression_ratio": self.compression_ratio, "bits_per_s": self.bits_per_s}


@dataclass(frozen=True)
class Series:
    """Summary of the values that an algorithm reported under one name.

    Attributes:
        count: number of values.
        last, mean, max: the last value, the mean and the maximum.
    """

    count: int = 0
    last: float = 0.0
    mean: float = 0.0
    max: float = 0.0

    def plus(self, value: float) -> Series:
        """With one more value."""
        count = self.count + 1
        mean = self.mean + (value - self.mean) / count
        return Series(count, value, mean, value if self.count == 0 else max(self.max, value))


@dataclass(frozen=True)
class Stats:
    """Snapshot of a module's communication on this rank, returned by `bagua.stats`.

    Attributes:
        algorithm: the algorithm and its options: those that were given, and those that were decided. `notices` tell of
            an option that is None and depends on the model, such as `mean_moments`. With "auto" followed by the
            algorithm in force: `Auto(...): ByteGrad(...)`.
        steps: number of completed training steps.
        num_buckets: number of buckets; 0 until the first synchronised backward pass has recorded the gradient order.
        bucket_bytes: size of each bucket in bytes.
        scratch_bytes: memory used for encoded data and staging.
        last: cost of the last step that communicated.
        total: cost of all steps.
        notices: options without effect here and the reasons, fallbacks, and other deviations; each was logged once.
        extra: further values that the algorithm reports, by name; see the algorithm.
        quality: the last measurement of the `Guard`.
        tuning: autotuning status and progress; None without autotuning.
        membership: with `fault_tolerant`, the changes of the members, newest last.
        rank, size: of this process among those that train the module now.
    """

    algorithm: str
    steps: int
    num_buckets: int
    bucket_bytes: tuple[int, ...]
    scratch_bytes: int
    last: StepStats
    total: StepStats
    notices: tuple[str, ...] = ()
    extra: Mapping[str, Series] = field(default_factory=dict)
    quality: Quality | None = None
    tuning: Progress | None = None
    membership: tuple[MembershipChange, ...] = ()
    rank: int = 0
    size: int = 1

    def to_dict(self) -> dict[str, Any]:
        """All attributes as plain dicts, for a logger; with those that are computed, which `asdict` leaves out.

        Examples:
            >>> bagua.stats(model).to_dict()["total"]["compression_ratio"] >= 1
            True
        """
        return {**asdict(self), "last": self.last.to_dict(), "total": self.total.to_dict()}


@dataclass
class _Sum:
    bytes_sent: int = 0
    bytes_received: int = 0
    payload_bytes: int = 0
    dense_bytes: int = 0
    comm_s: float = 0.0
    exposed_s: float = 0.0
    launches: int = 0

    def freeze(self) -> StepStats:
        return StepStats(**vars(self))

    def add(self, other: _Sum) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Tally:
    """Counts for one module. Written by the training thread only, after it waited."""

    meters: Sequence[Meter]
    size: int
    _step: _Sum = field(default_factory=_Sum)
    _last: _Sum = field(default_factory=_Sum)
    _total: _Sum = field(default_factory=_Sum)
    _seen: tuple[int, int] = (0, 0)
    _unread: list[StreamTicket] = field(default_factory=list)

    def watch(self, meters: Sequence[Meter]) -> None:
        """Count the bytes of another lane too."""
        self.meters = [*self.meters, *meters]

    def launched(self, payload_bytes: int) -> None:
        """Count a launch."""
        self._step.launches += 1
        self._step.payload_bytes += payload_bytes
        self._step.dense_bytes += int(2 * payload_bytes * (self.size - 1) / self.size)

    def waited(self, tickets: Sequence[Ticket], exposed_s: float) -> None:
        """Count what has been waited for."""
        self._step.exposed_s += exposed_s
        busy: list[tuple[float, float]] = []
        for ticket in tickets:
            if ticket.error is None and isinstance(ticket, StreamTicket):
                self._unread.append(ticket)  # its duration is known later; asking now would stop the CPU
            else:
                busy.append((ticket.ended - ticket.seconds, ticket.ended))
        self._step.comm_s += _covered(busy)
        self._collect()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is sent and received meanwhile is not training."""
        before = self._moved()
        try:
            yield
        finally:
            after = self._moved()
            self._seen = (self._seen[0] + after[0] - before[0], self._seen[1] + after[1] - before[1])

    def _moved(self) -> tuple[int, int]:
        return sum(m.sent for m in self.meters), sum(m.received for m in self.meters)

    def step_ended(self) -> None:
        """End the counts of a step."""
        self._collect()
        self._count_bytes()
        if self._step.launches:
            self._last = self._step
        self._total.add(self._step)
        self._step = _Sum()

    def carry(self, earlier: Tally) -> None:
        """Count on from an engine that this one replaces, with what it spent on a step that it did not end."""
        earlier._count_bytes()
        self._last = earlier._last
        self._total.add(earlier._total)
        self._total.add(earlier._step)

    @property
    def total(self) -> StepStats:
        """Of the steps that have ended. From any thread."""
        return self._total.freeze()

    def snapshot(self) -> tuple[StepStats, StepStats]:
        """(last step that communicated, total)."""
        self._collect()
        return self._last.freeze(), self._total.freeze()

    def _count_bytes(self) -> None:
        sent, received = self._moved()
        self._step.bytes_sent += sent - self._seen[0]
        self._step.bytes_received += received - self._seen[1]
        self._seen = (sent, received)

    def _collect(self) -> None:
        pending = []
        for ticket in self._unread:
            seconds = ticket.device_seconds()
            if seconds is None:
                pending.append(ticket)
            else:
                self._step.comm_s += seconds
        self._unread = pending


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the intervals."""
    total, end = 0.0, float("-inf")
    for begun, ended in sorted(intervals):
        total += max(0.0, ended - max(begun, end))
        end = max(end, ended)
    return total
