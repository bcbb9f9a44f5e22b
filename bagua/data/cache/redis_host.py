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
    try:
        parts = urlsplit(url)
        port, name = parts.port or 6379, parts.hostname
        db = int(parts.path.strip("/") or 0)
    except ValueError as error:
        raise ValueError(f"{where}: not a redis:// URL: {error}") from None
    if parts.scheme not in ("redis", "rediss") or not name or parts.query:
        raise ValueError(f"{where}: expected redis://[user:password@]host[:port][/db] or rediss://...")
    username = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    return RedisHost(name, port, username, password, db, () if parts.scheme == "rediss" else None)


def _from_mapping(where: str, given: Mapping[str, Any]) -> RedisHost:
    options = dict(given)
    try:
        host, port = options.pop("host"), int(options.pop("port", 6379))
    except (KeyError, TypeError, ValueError):
        raise ValueError(f'{where}: expected "host" and a number as "port"') from None
    username, password, db = options.pop("username", None), options.pop("password", None), options.pop("db", 0)
    tls = {name: options.pop(name) for name in sorted(_TLS_OPTIONS & set(options))}
    wants_tls = bool(options.pop("ssl", bool(tls)))
    if tls and not wants_tls:
        raise ValueError(f"{where}: {', '.join(tls)} given, but ssl=False")
    if options:
        raise ValueError(f"{where}: unknown option {', '.join(map(repr, options))}")
    if not isinstance(host, str) or not host or not 0 < port < 65536:
        raise ValueError(f"{where}: {host!r}, port {port} is not an address")
    return RedisHost(host, port, username, password, int(db), tuple(tls.items()) if wants_tls else None)
