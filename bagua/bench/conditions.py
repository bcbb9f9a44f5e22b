"""Conditions of the network, as written on the command line: `1gbit/5ms`, `250mbit/0ms/jitter2ms`, `nolimit`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = ["Condition", "parse"]

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SPEED = re.compile(r"^(\d+(?:\.\d+)?)(k|m|g)?bit$")
_TIME = re.compile(r"^(jitter)?(\d+(?:\.\d+)?)(us|ms|s)$")
_TCP = re.compile(r"^tcp([a-z0-9_]+)$")
_LOSS = re.compile(r"^loss(\d*\.?\d+)$")
_SLOW = re.compile(r"^slow(\d*\.?\d+)$")
_WIRE = re.compile(r"^wire(veth|tbf|relay|tap|packet)$")
_NAMED = (("congestion", _TCP), ("wire", _WIRE))
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Condition:
    """A link, the same for all hosts, and maybe one slow host.

    Attributes:
        name: as it was written.
        bits_per_s: of a host's link, each way; infinite for no limit.
        latency_s: from one host to another, one way.
        jitter_s: by which the latency varies.
        slow: speed of the last host; 1 is as fast as the others.
        congestion: how the hosts' TCP adapts its rate; None for the default of the lab.
        wire: what carries the frames; "auto": what the lab takes for such a link.
        loss: probability that a packet is lost, 0 to below 1.
    """

    name: str
    bits_per_s: float = math.inf
    latency_s: float = 0.0
    jitter_s: float = 0.0
    slow: float = 1.0
    congestion: str | None = None
    wire: str = "auto"
    loss: float = 0.0


def parse(text: str) -> Condition:
    """Read one condition: a bandwidth or `nolimit`, then the rest in any order.

    Raises:
        ValueError: names the part that is wrong.
    """
    values: dict[str, float] = {}
    names: dict[str, str] = {}
    for word in text.lower().split("/"):
        speed, time, slow, loss = _SPEED.match(word), _TIME.match(word), _SLOW.match(word), _LOSS.match(word)
        named = next(((key, found[1]) for key, pattern in _NAMED if (found := pattern.match(word))), None)
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
                "a jitter (jitter2ms), a slow host (slow0.5), a loss (loss0.001), a congestion control (tcpbbr) nor "
                "a wire (wirerelay)"
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
    condition = Condition(text, **values, congestion=names.get("congestion"), wire=names.get("wire", "auto"))
    delayed, limited = condition.latency_s or condition.jitter_s or condition.loss, condition.bits_per_s < math.inf
    if (condition.wire in ("veth", "tbf") and delayed) or (condition.wire == "veth" and limited):
        raise ValueError(f"condition {text!r}: wire {condition.wire} cannot emulate that; use wirerelay")
    return condition
