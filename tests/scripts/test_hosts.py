"""Lists of hosts."""

from __future__ import annotations

import pytest

from bagua.script.hosts import Host, parse_hosts


def test_names_addresses_users_and_ports() -> None:
    hosts = parse_hosts("a.example:22, me@10.0.0.2,[::1]:23,fe80::1,me@[fe80::2]", port=7)
    assert [(host.target, host.port) for host in hosts] == [
        ("a.example", 22),
        ("me@10.0.0.2", 7),
        ("::1", 23),
        ("fe80::1", 7),
        ("me@fe80::2", 7),
    ]
    assert [host.name for host in hosts] == ["a.example", "10.0.0.2", "::1", "fe80::1", "fe80::2"]
    assert [host.is_loopback for host in hosts] == [False, False, True, False, False]
    assert parse_hosts("a")[0].port is None


def test_labels_are_unique() -> None:
    assert [host.label for host in parse_hosts("a,b,a")] == ["a#0", "b", "a#2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,,b", "a host is missing between commas"),
        ("-oProxyCommand=x", "expected a name or an address"),
        ("a;reboot", "expected a name or an address"),
        ("$(x)", "expected a name or an address"),
        ("me@-a", "expected a name or an address"),
        ("-me@a", "expected a name or an address"),
        ("@a", "expected a name or an address"),
        ("a:0", "the port must be a number from 1 to 65535, not '0'"),
        ("a:65536", "the port must be a number"),
        ("a:ssh", "the port must be a number"),
        ("a:", "the port must be a number"),
        ("[::1", r"expected \[IPv6 address\]"),
        ("[a]:22", r"expected \[IPv6 address\]"),
        ("[::1]22", r"expected \[IPv6 address\]"),
    ],
)
def test_what_is_no_host_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_hosts(text)


def test_loopback_names() -> None:
    assert Host("", "localhost", None).is_loopback
    assert Host("", "me@127.0.0.2", None).is_loopback
    assert not Host("", "10.0.0.1", None).is_loopback
