"""Which addresses of this host others can reach."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from bagua import own_address
from bagua.own_address import address_towards, first_address, interface_of, is_loopback, is_own, name_problem


def test_loopback() -> None:
    assert (first_address("127.0.0.1"), first_address("no-such-name.invalid")) == ("127.0.0.1", None)
    assert is_loopback("127.0.1.1") and is_loopback("::1") and not is_loopback("10.0.0.1")
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert not is_own("127.0.0.1") and not is_own("192.0.2.1") and not is_own("no-such-name.invalid")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (["127.0.1.1"], "'box', is 127.0.1.1 here, which no other host can reach"),
        (["192.0.2.1"], "'box', is 192.0.2.1 here, which is no address of this host"),
        ([], "'box', does not resolve here"),
        (["10.0.0.1", "127.0.1.1"], ""),
        (["127.0.1.1", "10.0.0.1"], "'box', is 127.0.1.1 here, which no other host can reach"),  # gloo takes the first
    ],
)
def test_what_the_own_name_stands_for(found: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*args: Any, **kw: Any) -> list[Any]:
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in found]

    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(own_address, "_source", lambda address: "10.0.0.1")
    assert name_problem().endswith(words) and bool(name_problem()) == bool(words)
