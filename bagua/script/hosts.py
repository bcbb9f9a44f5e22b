"""The hosts of a job, as `--host_list` names them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

__all__ = ["Host", "parse_hosts"]

_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_][A-Za-z0-9._-]*\Z")
_USER = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?\Z")


@dataclass(frozen=True)
class Host:
    """Where one node of the job runs.

    Attributes:
        label: what the user called it; unique, for the output.
        target: what ssh is given: [user@]name.
        port: of its ssh server; None: ssh's default, or that of its configuration.
    """

    label: str
    target: str
    port: int | None

    @property
    def name(self) -> str:
        """Name or address, without the user."""
        return self.target.rpartition("@")[2]

    @property
    def is_loopback(self) -> bool:
        """Whether other machines cannot reach it under this name."""
        if self.name == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.name).is_loopback
        except ValueError:
            return False


def parse_hosts(text: str, port: int | None = None) -> list[Host]:
    """Return the hosts of `[user@]name[:port],...`; an IPv6 address with a port is `[address]:port`.

    Args:
        text: the list.
        port: of those that name none.

    Raises:
        ValueError: a host is empty, is not a name or address, or has an impossible port; names it.
    """
    words = [word.strip() for word in text.split(",")]
    found = [_parse_host(word, port) for word in words]
    labels = [f"{word}#{number}" if words.count(word) > 1 else word for number, word in enumerate(words)]
    return [Host(label, target, its) for label, (target, its) in zip(labels, found, strict=True)]


def _parse_host(word: str, port: int | None) -> tuple[str, int | None]:
    if not word:
        raise ValueError("a host is missing between commas; expected [user@]name[:port],...")
    user, _, rest = word.rpartition("@")
    user = f"{user}@" if user or word.startswith("@") else ""
    if rest.startswith("["):
        name, bracket, tail = rest[1:].partition("]")
        if not bracket or not _is_ipv6(name) or (tail and not tail.startswith(":")) or not _USER.match(user):
            raise ValueError(f"host {word!r}: expected [IPv6 address] or [IPv6 address]:port")
        return f"{user}{name}", _port(word, tail[1:]) if tail else port
    if _is_ipv6(rest) and _USER.match(user):
        return f"{user}{rest}", port
    name, colon, tail = rest.partition(":")
    if not _NAME.match(f"{user}{name}"):
        raise ValueError(f"host {word!r}: expected a name or an address, as [user@]name[:port]")
    return f"{user}{name}", _port(word, tail) if colon else port


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _port(word: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= 65535):
        raise ValueError(f"host {word!r}: the port must be a number from 1 to 65535, not {text!r}")
    return int(text)
