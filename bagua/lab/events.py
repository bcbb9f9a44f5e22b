"""Timed events of a job, such as `5s:cut:1`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bagua.lab.host import Host
from bagua.lab.link import Link, moment

__all__ = ["Event", "apply_event", "parse_event", "wire_for"]

_PLAIN = ("cut", "restore", "pause", "resume", "kill", "start")
_VALUED = ("slow", "bandwidth", "latency", "kill-rank")
_IMPOSSIBLE = {"veth": {"cut", "restore", "bandwidth", "latency"}, "tbf": {"latency"}}


@dataclass(frozen=True)
class Event:
    """One action. `start` starts the host's command again; the job does that."""

    at_s: float
    action: str
    host: int
    value: str = ""


def parse_event(text: str, num_hosts: int) -> Event:
    """Reads `TIME:ACTION:HOST[=VALUE]`.

    Raises:
        ValueError: names what is wrong with it.
    """
    parts = text.split(":")
    if len(parts) != 3:
        raise ValueError(f"--at must be TIME:ACTION:HOST[=VALUE], e.g. 5s:cut:1, not {text!r}")
    host, _, value = parts[2].partition("=")
    if parts[1] not in (*_PLAIN, *_VALUED):
        raise ValueError(f"--at {text}: the action must be one of {', '.join((*_PLAIN, *_VALUED))}")
    if not host.isdigit() or int(host) >= num_hosts:
        raise ValueError(f"--at {text}: the host must be from 0 to {num_hosts - 1}")
    if bool(value) != (parts[1] in _VALUED):
        raise ValueError(f"--at {text}: {parts[1]} {'needs' if parts[1] in _VALUED else 'has no'} =VALUE")
    if parts[1] == "slow" and not _is_speed(value):
        raise ValueError(f"--at {text}: slow needs a speed from 0.01 to 1")
    if parts[1] == "kill-rank" and not value.isdigit():
        raise ValueError(f"--at {text}: kill-rank needs a local rank, e.g. kill-rank:1=0")
    if parts[1] in ("bandwidth", "latency"):
        _changed(Link(), parts[1], value)
    return Event(moment(parts[0], f"--at {text}: the time"), parts[1], int(host), value)


def apply_event(event: Event, host: Host, link: Link) -> Link:
    """Apply the event to the host, which has `link`.

    Returns:
        the host's link from now on.
    """
    if event.action == "slow":
        host.slow(float(event.value))
    elif event.action == "kill-rank":
        host.kill_rank(int(event.value))
    elif event.action in _VALUED:
        link = _changed(link, event.action, event.value)
        host.set_link(link)
    else:
        getattr(host, event.action)()
    return link


def wire_for(events: Sequence[Event], link: Link, asked: str = "auto") -> str:
    """The `wire` of a cluster in which all of that can happen to hosts with this link.

    Raises:
        ValueError: the wire that is asked for cannot do it.
    """
    actions = {event.action for event in events}
    impossible = sorted(actions & _IMPOSSIBLE.get(asked, set()))
    if impossible:
        raise ValueError(f"--at: wire {asked} cannot do {', '.join(impossible)}: use --wire relay")
    if asked != "auto":
        return asked
    if "latency" in actions or (link.unlimited and actions & {"cut", "restore", "bandwidth"}):
        return "relay"
    return "auto"


def _changed(link: Link, name: str, value: str) -> Link:
    return replace(link, bandwidth=value) if name == "bandwidth" else replace(link, latency=value)


def _is_speed(text: str) -> bool:
    try:
        return 0.01 <= float(text) <= 1
    except ValueError:
        return False
