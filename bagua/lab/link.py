"""`Link`: bandwidth, latency, jitter and loss between a host and the switch; parsing of their strings."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = ["DEFAULT_QUEUE_BYTES", "Link", "bits_per_second", "moment", "num_bytes", "seconds"]

DEFAULT_QUEUE_BYTES = 1_000_000
_NUMBER = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z/]*)")
_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_OF_MOMENTS = {**_SECONDS, "m": 60.0, "min": 60.0, "h": 3600.0}
_MOST_S = 168 * 3600.0
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Link:
    """Link of one host to the switch. Each direction has these properties.

    Between two hosts a frame crosses the sender's uplink and the receiver's downlink: the slower bandwidth holds, each
    link has half of the latency and of the jitter, and so links that are alike give a one-way `latency`.

    Args:
        bandwidth: bits per second: "100mbit", "1gbit", "2.5gbps", or a number. None: no limit.
        latency: one way, from host to host: "2ms", "500us", "0.1s", or seconds as a number.
        jitter: a frame takes up to this much longer, evenly spread. Frames of one flow keep their order.
        loss: probability that a packet is lost on its way from host to host, 0 to < 1.
        flow_bandwidth: bits per second that one connection may have in one direction. None: no limit of its own.
        queue_bytes: what the switch holds for the host before it drops: bytes or "2mb". None: 1 MB, or twice
            bandwidth times latency if that is more.

    Raises:
        ValueError: for a value that is none of these; names the argument.

    Examples:
        >>> link = bagua.lab.Link(bandwidth="100mbit", latency="5ms")
        >>> cluster = bagua.lab.Cluster(hosts=4, link=link)  # doctest: +SKIP
    """

    bandwidth: str | float | None = None
    latency: str | float = 0.0
    jitter: str | float = 0.0
    loss: float = 0.0
    flow_bandwidth: str | float | None = None
    queue_bytes: str | int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.loss, (int, float)) or not 0 <= self.loss < 1:
            raise ValueError(f"loss must be a probability from 0 to below 1, not {self.loss!r}")
        self.settings()

    @property
    def unlimited(self) -> bool:
        """No property that a plain wire has not."""
        return self.settings()[:6] == (0, 0, 0, 0.0, 0, 0) and self.queue_bytes is None

    @property
    def only_bandwidth(self) -> bool:
        """A bandwidth, and maybe a queue, but nothing for which frames must be held or picked one by one."""
        return self.settings()[0] > 0 and self.settings()[1:5] == (0, 0, 0.0, 0)

    def settings(self) -> tuple[int, int, int, float, int, int]:
        """As the relay takes it: bandwidth (bit/s, 0: none), latency and jitter (ns), loss, flow cap, queue (bytes)."""
        bandwidth = 0 if self.bandwidth is None else bits_per_second(self.bandwidth, "bandwidth")
        flow = 0 if self.flow_bandwidth is None else bits_per_second(self.flow_bandwidth, "flow_bandwidth")
        latency = seconds(self.latency, "latency")
        if self.queue_bytes is not None:
            queue = num_bytes(self.queue_bytes, "queue_bytes")
        else:
            queue = max(DEFAULT_QUEUE_BYTES, round(2 * bandwidth / 8 * latency)) if bandwidth else 0
        return bandwidth, round(latency * 1e9), round(seconds(self.jitter, "jitter") * 1e9), self.loss, flow, queue


def bits_per_second(value: str | float, name: str = "bandwidth") -> int:
    """Reads a rate: "250mbit", "1gbit", "1gbps", "10mbit/s", or bits per second as a number.

    Raises:
        ValueError: if it is not a positive rate of at least 1 kbit/s.
    """
    number, unit = _split(value, name, "a rate like '100mbit' or '1gbit'")
    for ending in ("bit/s", "bits/s", "bit", "bits", "bps", "b/s"):
        if unit.endswith(ending):
            unit = unit[: -len(ending)]
            break
    else:
        if not isinstance(value, (int, float)):
            raise ValueError(f"{name} must be a rate with a unit of bits like '100mbit' or '1gbit', not {value!r}")
    if unit not in _BITS:
        raise ValueError(f"{name} must be a rate like '100mbit' or '1gbit', not {value!r}")
    rate = number * _BITS[unit]
    if not 1000 <= rate <= 1e13:
        raise ValueError(f"{name} must be between 1 kbit/s and 10 Tbit/s, not {value!r}")
    return round(rate)


def seconds(value: str | float, name: str) -> float:
    """Reads a duration: "2ms", "500us", "1s", or seconds as a number.

    Raises:
        ValueError: if it is none, is negative, or above one minute.
    """
    number, unit = _split(value, name, "a duration like '2ms' or '500us'")
    if isinstance(value, str) and number and unit not in _SECONDS:
        raise ValueError(f"{name} must be a duration with a unit like '2ms' or '500us', not {value!r}")
    duration = number * _SECONDS.get(unit, 1.0)
    if not 0 <= duration <= 60:
        raise ValueError(f"{name} must be between 0 and 60 s, not {value!r}")
    return duration


def moment(value: str, name: str) -> float:
    """Reads a time since the beginning of a job, in seconds: "500ms", "90s", "5m", "2h".

    Raises:
        ValueError: if it is none, is negative, or above a week.
    """
    number, unit = _split(value, name, "a time like '90s' or '5m'")
    if unit not in _OF_MOMENTS and (number or unit):
        raise ValueError(f"{name} must be a time with a unit (ms, s, m, h), not {value!r}")
    at_s = number * _OF_MOMENTS.get(unit, 1.0)
    if not 0 <= at_s <= _MOST_S:
        raise ValueError(f"{name} must be between 0 and 168h, not {value!r}")
    return at_s


def num_bytes(value: str | int, name: str) -> int:
    """Reads a size: "2mb", "512kib", or bytes as a number.

    Raises:
        ValueError: if it is none, or below one frame of 64 KiB.
    """
    number, unit = _split(value, name, "a size like '2mb' or '512kib'")
    if unit not in _BYTES:
        raise ValueError(f"{name} must be a size like '2mb' or '512kib', not {value!r}")
    size = round(number * _BYTES[unit])
    if size < 65536:
        raise ValueError(f"{name} must be at least 64 KiB, the largest frame, not {value!r}")
    return size


def _split(value: str | float, name: str, wanted: str) -> tuple[float, str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value), ""
    match = _NUMBER.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
    return float(match[1]), match[2]
