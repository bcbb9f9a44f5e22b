"""Report of a cluster: bytes per link, and whether the machine kept up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["HostReport", "PairReport", "Report"]


@dataclass(frozen=True)
class HostReport:
    """One host's link since the cluster started. Drops are frames: one may be a TSO packet of 64 KB."""

    name: str
    sent_bytes: int  # what the host put on the wire; with a relay with the headers of each packet, else of each frame
    received_bytes: int
    queue_drops: int = 0  # did not fit the switch's queue to this host
    loss_drops: int = 0
    cut_drops: int = 0
    port_drops: int = 0  # the host's device did not take it, or no such destination


@dataclass(frozen=True)
class PairReport:
    """The way from one host to another that has a link of its own, since the cluster started."""

    sender: int
    receiver: int
    sent_bytes: int  # that the link has carried, with the headers of each packet
    queue_drops: int  # frames that did not fit its queue; they are among the receiver's too


@dataclass(frozen=True)
class Report:
    """All hosts, and the relay. Punctuality is None where there is no relay to know it."""

    hosts: tuple[HostReport, ...]
    wall_s: float
    relay_cpu_s: float = 0.0
    frames: int = 0
    late_frames: int | None = 0  # released over 1 ms later than due
    late_mean_ms: float | None = 0.0  # of all frames
    late_max_ms: float | None = 0.0
    wire: str = ""  # what carried the frames
    starved: int = 0  # times at which the relay had no buffer left and let frames wait
    pairs: tuple[PairReport, ...] = ()

    @property
    def machine_limited(self) -> bool:
        """More than 2 in 100 frames were late, or buffers ran out: the machine and not the link was the limit."""
        return (self.late_frames or 0) > 0.02 * max(self.frames, 1) or self.starved > 0

    def since(self, earlier: Report) -> Report:
        """What was added after `earlier`; `late_max_ms` stays that of the whole time."""
        frames = self.frames - earlier.frames
        hosts = tuple(
            HostReport(now.name, **{k: v - getattr(then, k) for k, v in asdict(now).items() if k != "name"})
            for now, then in zip(self.hosts, earlier.hosts, strict=True)
        )
        pairs = tuple(
            replace(now, sent_bytes=now.sent_bytes - then.sent_bytes, queue_drops=now.queue_drops - then.queue_drops)
            for now, then in zip(self.pairs, earlier.pairs, strict=True)
        )
        late: dict[str, Any] = dict.fromkeys(("late_frames", "late_mean_ms", "late_max_ms"))
        if self.late_frames is not None and self.late_mean_ms is not None:
            late_ms = self.late_mean_ms * self.frames - (earlier.late_mean_ms or 0) * earlier.frames
            late = {
                "late_frames": self.late_frames - (earlier.late_frames or 0),
                "late_mean_ms": late_ms / frames if frames else 0.0,
                "late_max_ms": self.late_max_ms,
            }
        return Report(
            hosts=hosts,
            wall_s=self.wall_s - earlier.wall_s,
            relay_cpu_s=self.relay_cpu_s - earlier.relay_cpu_s,
            frames=frames,
            wire=self.wire,
            starved=self.starved - earlier.starved,
            pairs=pairs,
            **late,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "machine_limited": self.machine_limited}
