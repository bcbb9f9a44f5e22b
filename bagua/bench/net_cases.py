"""What `bagua bench net` measures: links, the plugin's settings on them, and what should come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from bagua.bench.net_links import FlowCaps, Queue

__all__ = ["CASES", "GOALS", "Case", "Goal", "Sample"]

_ONE = {"BAGUA_NET_FLOWS": "1"}


@dataclass(frozen=True)
class Case:
    """One link.

    Attributes:
        shape: of the link between two namespaces; None: a veth pair without limits.
        socket_bytes: instead, over loopback: bytes per second that each socket may send (no root needed).
        variants: settings of the plugin, by name. "default" is what users get.
        span_s: what is measured, after `warmup_s`. Cases in which the plugin should do no harm begin at once, so
            that what its trials of more flows cost is in the figures.
    """

    name: str
    what: str
    shape: Queue | FlowCaps | None = None
    socket_bytes: int = 0
    channels: int = 1
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {"default": {}})
    span_s: float = 2.0
    warmup_s: float = 1.5
    message_bytes: int = 512 << 10


CASES = (
    Case("paced", "loopback, 1 Gbit/s per socket", socket_bytes=125_000_000, variants={"one": _ONE, "default": {}}),
    Case(
        "flow1g",
        "1 Gbit/s per flow, 10 Gbit/s in total",
        FlowCaps("10gbit", ("1gbit",)),
        variants={"one": _ONE, "default": {}},
    ),
    Case("flow1g-2", "the same, 2 channels", FlowCaps("10gbit", ("1gbit",)), channels=2),
    Case(
        "flow5g",
        "5 Gbit/s per flow, 25 Gbit/s in total",
        FlowCaps("25gbit", ("5gbit",)),
        variants={"default": {}, "fixed": {"BAGUA_NET_ADAPT": "0"}},
    ),
    Case(
        "uneven",
        "10 Gbit/s in total, flows of 1.5, 1.5, 1.5 and 0.2 Gbit/s",
        FlowCaps("10gbit", ("1500mbit", "1500mbit", "1500mbit", "200mbit")),
        variants={
            "16 flows": {"BAGUA_NET_FLOWS": "16"},
            "16 equal stripes": {"BAGUA_NET_FLOWS": "16", "BAGUA_NET_ADAPT": "0", "BAGUA_NET_SCHEDULE": "stripes"},
        },
        warmup_s=2.5,
    ),
    Case("unshaped", "veth without limits", variants={"one": _ONE, "default": {}}, span_s=3.0, warmup_s=0.0),
    Case("unshaped-4", "the same, 4 channels", channels=4),
    Case(
        "link1g",
        "one queue of 1 Gbit/s, 20 ms",
        Queue("1gbit", "256kb", "20ms"),
        variants={"one": _ONE, "default": {}},
        span_s=3.0,
        warmup_s=0.0,
    ),
    Case("link10g", "one queue of 10 Gbit/s, 10 ms", Queue("10gbit", "2mb", "10ms"), span_s=3.0, warmup_s=0.0),
    Case("shallow", "2 Gbit/s, 256 KB, 2 ms", Queue("2gbit", "256kb", "2ms"), span_s=4.0, warmup_s=0.0),
    Case("very-shallow", "2 Gbit/s, 64 KB, 0.5 ms", Queue("2gbit", "64kb", "500us"), span_s=4.0, warmup_s=0.0),
)


@dataclass(frozen=True)
class Sample:
    """One run.

    Attributes:
        gbit_s: payload that arrived.
        typical_gbit_s: the same for the median tenth of a second: without stops of the machine.
        cpu_s_per_gb: of a core, sending and receiving side.
        evenness: bytes of the slowest channel over those of the fastest.
        others_cpu: share of all cores that other processes took.
    """

    gbit_s: float
    typical_gbit_s: float
    cpu_s_per_gb: tuple[float, float]
    evenness: float
    others_cpu: float


Samples = Mapping[tuple[str, str], "list[Sample]"]


@dataclass(frozen=True)
class Goal:
    """What the plugin is to reach. `value` takes the samples of all cases; None where they are missing."""

    name: str
    at_least: float
    value: Callable[[Samples], float | None]
    at_most: bool = False


def _rate(case: str, variant: str = "default") -> Callable[[Samples], float | None]:
    return lambda all_: median(s.gbit_s for s in all_[case, variant]) if all_.get((case, variant)) else None


def _ratio(case: str, over: str = "one", under: str = "default") -> Callable[[Samples], float | None]:
    def value(all_: Samples) -> float | None:
        top, bottom = _rate(case, under)(all_), _rate(case, over)(all_)
        return top / bottom if top is not None and bottom else None

    return value


def _evenness(all_: Samples) -> float | None:
    found = all_.get(("unshaped-4", "default"))
    return median(s.evenness for s in found) if found else None


def _cpu(all_: Samples) -> float | None:
    found = all_.get(("unshaped", "default"))
    return median(max(s.cpu_s_per_gb) for s in found) if found else None


GOALS = (
    Goal("paced sockets, times one flow", 7, _ratio("paced")),
    Goal("1 of 10 Gbit/s per flow, one channel, Gbit/s", 7, _rate("flow1g")),
    Goal("1 of 10 Gbit/s per flow, two channels, Gbit/s", 9, _rate("flow1g-2")),
    Goal("5 of 25 Gbit/s per flow, Gbit/s", 20, _rate("flow5g")),
    Goal("5 of 25 Gbit/s per flow, all flows at all times, Gbit/s", 20, _rate("flow5g", "fixed")),
    Goal("uneven flows, Gbit/s", 8.5, _rate("uneven", "16 flows")),
    Goal("uneven flows in equal stripes, Gbit/s", 4, _rate("uneven", "16 equal stripes"), at_most=True),
    Goal("unshaped, of one flow", 0.85, _ratio("unshaped")),
    Goal("unshaped, CPU seconds per GB and side", 0.2, _cpu, at_most=True),
    Goal("four channels, slowest over fastest", 0.9, _evenness),
    Goal("plain 1 Gbit/s link, Gbit/s", 0.97, _rate("link1g")),
    Goal("plain 1 Gbit/s link, of one flow", 0.97, _ratio("link1g")),
    Goal("plain 10 Gbit/s link, Gbit/s", 9.3, _rate("link10g")),
    Goal("shallow queue, Gbit/s", 1.7, _rate("shallow")),
    Goal("very shallow queue, Gbit/s", 1.2, _rate("very-shallow")),
)
