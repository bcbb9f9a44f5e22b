"""Conditions of the network, as written on the command line.

`1gbit/5ms`, `250mbit/0ms/jitter2ms`, `nolimit`, `1gbit/0-1=50mbit+20ms` (a link of two hosts of its own).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Condition", "Pair", "parse"]

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SPEED = re.compile(r"^(\d+(?:\.\d+)?)(k|m|g)?bit$")
_TIME = re.compile(r"^(jitter)?(\d+(?:\.\d+)?)(us|ms|s)$")
_TCP = re.compile(r"^tcp([a-z0-9_]+)$")
_LOSS = re.compile(r"^loss(\d*\.?\d+)$")
_SLOW = re.compile(r"^slow(\d*\.?\d+)$")
_WIRE = re.compile(r"^wire(veth|tbf|relay|tap|packet)$")
_PAIR = re.compile(r"^(\d+)-(\d+)=(\d+(?:\.\d+)?)(k|m|g)?bit(?:\+(\d+(?:\.\d+)?)(us|ms|s))?$")
_NAMED = (("congestion", _TCP), ("wire", _WIRE))
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Pair(NamedTuple):
    """The link between two hosts, both ways: bits per second, and seconds one way (0: as between other hosts)."""

    first: int
    second: int
    bits_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Condition:
    """A link, the same for all hosts, maybe links of pairs of hosts beside it, and maybe one slow host.

    Attributes:
        name: as it was written.
        bits_per_s: of a host's link, each way; infinite for no limit.
        latency_s: from one host to another, one way.
        jitter_s: by which the latency varies.
        slow: speed of the last host; 1 is as fast as the others.
        congestion: how the hosts' TCP adapts its rate; None for the default of the lab.
        wire: what carries the frames; "auto": what the lab takes for such a link.
        loss: probability that a packet is lost, 0 to below 1.
        pairs: hosts between which there is a link of its own.
    """

    name: str
    bits_per_s: float = math.inf
    latency_s: float = 0.0
    jitter_s: float = 0.0
    slow: float = 1.0
    congestion: str | None = None
    wire: str = "auto"
    loss: float = 0.0
    pairs: tuple[Pair, ...] = ()

    def host_bits_per_s(self, hosts: int) -> float:
        """What the most limited of `hosts` can send at most, over all of its links together."""
        own = {frozenset(each[:2]): each.bits_per_s for each in self.pairs}
        if hosts < 2:
            return self.bits_per_s
        ways = (sum(own.get(frozenset((a, b)), math.inf) for b in range(hosts) if b != a) for a in range(hosts))
        return min(self.bits_per_s, *ways)

    def least_latency_s(self, hosts: int) -> float:
        """Seconds one way between the two hosts that are nearest to each other."""
        own = {frozenset(each[:2]): each.latency_s for each in self.pairs if each.latency_s}
        if len(own) < hosts * (hosts - 1) // 2:
            return min(self.latency_s, *own.values()) if own else self.latency_s
        return min(own.values(), default=self.latency_s)

    def check_hosts(self, hosts: int) -> None:
        """Refuse pairs of hosts that there are not.

        Raises:
            ValueError: names the condition.
        """
        for each in self.pairs:
            if max(each[:2]) >= hosts:
                raise ValueError(f"condition {self.name!r}: {each.first}-{each.second} needs more than {hosts} hosts")


def parse(text: str) -> Condition:
    """Read one condition: a bandwidth or `nolimit`, then the rest in any order.

    Raises:
        ValueError: names the part that is wrong.
    """
    values: dict[str, float] = {}
    names: dict[str, str] = {}
    pairs: dict[frozenset[int], Pair] = {}
    for word in text.lower().split("/"):
        speed, time, slow, loss = _SPEED.match(word), _TIME.match(word), _SLOW.match(word), _LOSS.match(word)
        named = next(((key, found[1]) for key, pattern in _NAMED if (found := pattern.match(word))), None)
        if (pair := _PAIR.match(word)) is not None:
            latency_s = float(pair[5]) * _SECONDS[pair[6]] if pair[5] else 0.0
            each = Pair(int(pair[1]), int(pair[2]), float(pair[3]) * _UNITS[(pair[4] or "") + "bit"], latency_s)
            ends = frozenset(each[:2])
            if len(ends) < 2 or ends in pairs or not each.bits_per_s > 0:
                raise ValueError(f"condition {text!r}: {word!r} must be a rate between two hosts, once for each pair")
            pairs[ends] = each
            continue
        if named is not None:
            if named[0] in names:
                raise ValueError(f"condition {text!r}: two values for {named[0]}")
            names[named[0]] = named[1]
            continue
        if word == "nolimit":
            key, value = "bits_per_s", math.inf
        elif speed:
            key, value = "bits_per_s", float(speed[1]) * _UNITS[(speed[2] or "") + "bit"]
        elif time:
            key, value = ("jitter_s" if time[1] else "latency_s"), float(time[2]) * _SECONDS[time[3]]
        elif slow:
            key, value = "slow", float(slow[1])
        elif loss:
            key, value = "loss", float(loss[1])
        else:
            raise ValueError(
                f"condition {text!r}: {word!r} is neither a bandwidth (1gbit, 250mbit, nolimit), a latency (5ms), "
                "a jitter (jitter2ms), a slow host (slow0.5), a loss (loss0.001), a congestion control (tcpbbr), "
                "a wire (wirerelay) nor a link of two hosts (0-1=50mbit+20ms)"
            )
        if key in values:
            raise ValueError(f"condition {text!r}: two values for {key}")
        if key in ("bits_per_s", "slow") and not value > 0:
            raise ValueError(f"condition {text!r}: {word!r} must be more than 0")
        if key == "loss" and not value < 1:
            raise ValueError(f"condition {text!r}: {word!r} must be less than 1")
        values[key] = value
    if "bits_per_s" not in values:
        raise ValueError(f"condition {text!r}: a bandwidth is missing; write nolimit for none")
    condition = Condition(
        text,
        **values,
        congestion=names.get("congestion"),
        wire=names.get("wire", "auto"),
        pairs=tuple(pairs.values()),
    )
    delayed = condition.latency_s or condition.jitter_s or condition.loss or condition.pairs
    limited = condition.bits_per_s < math.inf
    if (condition.wire in ("veth", "tbf") and delayed) or (condition.wire == "veth" and limited):
        raise ValueError(f"condition {text!r}: wire {condition.wire} cannot emulate that; use wirerelay")
    return condition
