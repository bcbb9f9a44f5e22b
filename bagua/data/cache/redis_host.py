"""Address and credentials of a Redis or Valkey server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["RedisHost", "parse_hosts"]

_TLS_OPTIONS = {
    "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs",
}  # fmt: skip


@dataclass(frozen=True)
class RedisHost:
    """One server.

    Attributes:
        host: name or address.
        port: TCP port.
        username: of an access control list; None for the default user.
        password: None if it asks for none. Not part of the name, the representation or messages.
        db: number of the database.
        tls: options for redis-py's TLS connections; None: no TLS.
    """

    host: str
    port: int = 6379
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: tuple[tuple[str, Any], ...] | None = None

    @property
    def name(self) -> str:
        """`host:port/db`: what places it on the ring, and what messages call it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.db}"


def parse_hosts(hosts: Iterable[Any]) -> tuple[RedisHost, ...]:
    """Parse the option `hosts`: `{"host": ..., "port": ...}` with more options, or `redis://:password@host:port/db`.

    Raises:
        TypeError, ValueError: an entry is none of these; names it.
    """
    if isinstance(hosts, (str, Mapping)):
        raise TypeError("hosts: expected a list of servers, got a single one")
    if not isinstance(hosts, Iterable):
        raise TypeError(f"hosts: expected a list of servers, got {type(hosts).__name__}")
    parsed = tuple(_parse(f"hosts[{i}]", host) for i, host in enumerate(hosts))
    if not parsed:
        raise ValueError("hosts: the list is empty; pass None to start a server on each node")
    names = [host.name for host in parsed]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"hosts: {', '.join(sorted(twice))} is listed more than once")
    return parsed


def _parse(where: str, host: Any) -> RedisHost:
    if isinstance(host, RedisHost):
        return host
    if isinstance(host, str):
        return _from_url(where, host)
    if isinstance(host, Mapping):
        return _from_mapping(where, host)
    raise TypeError(f'{where}: expected {{"host": ..., "port": ...}} or a redis:// URL, got {type(host).__name__}')


def _from_url(where: str, url: str) -> RedisHost:
    # Errors do not quote what cannot be parsed: it may be a part of the password.
    wanted = f"{where}: expected redis://[user:password@]host[:port][/db] or rediss://..."
    try:
        parts = urlsplit(url)
        name = parts.hostname
    except ValueError:
        raise ValueError(wanted) from None
    if parts.scheme not in ("redis", "rediss") or not name:
        raise ValueError(wanted)
    if parts.query:
        raise ValueError(f'{wanted}, without "?...": pass {{"host": ..., "ssl": True, ...}} with these options instead')
    try:
        port = 6379 if parts.port is None else parts.port
    except ValueError:
        raise ValueError(f"{wanted}; the port is not a number from 1 to 65535") from None
    _check_port(where, port)
    database = parts.path.strip("/")
    db = _number(where, "db", database) if database else 0
    username = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    return RedisHost(name, port, username, password, db, () if parts.scheme == "rediss" else None)


def _from_mapping(where: str, given: Mapping[str, Any]) -> RedisHost:
    options = dict(given)
    host = options.pop("host", None)
    if not isinstance(host, str) or not host:
        raise ValueError(f'{where}: expected a name or an address as "host", got {host!r}')
    port, db = (_number(where, name, options.pop(name, usual)) for name, usual in (("port", 6379), ("db", 0)))
    _check_port(where, port)
    username, password = options.pop("username", None), options.pop("password", None)
    tls = {name: options.pop(name) for name in sorted(_TLS_OPTIONS & set(options))}
    wants_tls = options.pop("ssl", bool(tls))
    if not isinstance(wants_tls, bool):
        raise ValueError(f'{where}: expected True or False as "ssl", got {wants_tls!r}')
    if tls and not wants_tls:
        raise ValueError(f"{where}: {', '.join(tls)} given, but ssl=False")
    if options:
        raise ValueError(f"{where}: unknown option {', '.join(map(repr, options))}")
    return RedisHost(host, port, username, password, db, tuple(tls.items()) if wants_tls else None)


def _number(where: str, name: str, value: Any) -> int:
    """`value`, which is a number from 0 on, perhaps as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(f'{where}: expected a whole number from 0 on as "{name}", got {value!r}')


def _check_port(where: str, port: int) -> None:
    if not 0 < port < 65536:
        raise ValueError(f"{where}: the port is not a number from 1 to 65535, but {port}")
