"""Links of pairs of hosts: what the relay is told, what it carries, and that it is no faster."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from bagua.lab import Cluster, Host, LabError, Link
from bagua.lab.pairs import both_ways, parse_pairs, shared_paths
from bagua.lab.traffic import measure_round_trips
from tests.lines import read_line

pytestmark = pytest.mark.usefixtures("namespaces")

PAYLOAD = 400_000
RECEIVE = """
import socket
with socket.create_server(("", 7006)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    print(sum(map(len, iter(lambda: connection.recv(1 << 16), b""))), flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7006), timeout=60) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def transfer(sender: Host, receiver: Host) -> float:
    """Seconds from the first to the last byte of `PAYLOAD`."""
    return transfers([(sender, receiver)])


def transfers(ends: Sequence[tuple[Host, Host]]) -> float:
    """The same of several at once."""
    receiving = [
        receiver.popen([sys.executable, "-I", "-S", "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
        for _, receiver in ends
    ]
    for each in receiving:
        assert each.stdout is not None and read_line(each.stdout, "receiver") == "ready\n"
    started = time.monotonic()
    sending = [
        sender.popen([sys.executable, "-I", "-S", "-c", SEND, receiver.address, str(PAYLOAD)])
        for sender, receiver in ends
    ]
    for each in receiving:
        assert each.stdout is not None
        assert int(read_line(each.stdout, "transfer's end")) == PAYLOAD
    seconds = time.monotonic() - started
    for each in receiving:
        assert each.stdout is not None
        each.stdout.close()
    assert all(each.wait(60) == 0 for each in (*sending, *receiving))
    return seconds


def test_a_transfer_takes_the_link_of_its_pair() -> None:
    pairs = {(0, 1): Link("10mbit", "15ms", queue_bytes="1mb"), (1, 0): Link("200mbit")}
    with Cluster(3, Link("1gbit", "2ms"), pairs=pairs) as cluster:
        a, b, c = cluster.hosts
        assert cluster.wire == "tap" or cluster.wire == "packet"
        before = cluster.report()
        seconds = transfer(a, b)
        there, back = cluster.report().since(before).pairs
        assert (there.sender, there.receiver, back.sender, back.receiver) == (0, 1, 1, 0)
        assert 1514 / 1448 * PAYLOAD < there.sent_bytes < 1.06 * PAYLOAD, "payload, and headers for each packet"
        assert 0 < back.sent_bytes < 0.05 * PAYLOAD, "acknowledgements"
        assert there.queue_drops == back.queue_drops == 0
        assert seconds > 8 * 1514 / 1448 * PAYLOAD / 10e6, "no faster than the link"
        assert min(measure_round_trips(a, b, 3)) >= 0.017, "the latency of the pair there, of the hosts back"
        mid = cluster.report()
        transfer(a, c)
        assert sum(each.sent_bytes for each in cluster.report().since(mid).pairs) < 0.01 * PAYLOAD, "another link"


@pytest.mark.parametrize("shared", [True, False])
def test_hosts_of_a_site_share_the_link_to_another_one(shared: bool) -> None:
    link = Link("10mbit", "5ms", queue_bytes="4mb")
    pairs = {((0, 1), (2, 3)): link} if shared else {(a, b): link for a in (0, 1) for b in (2, 3)}
    with Cluster(4, Link("1gbit"), pairs=pairs) as cluster:
        a, b, c, d = cluster.hosts
        alone = 8 * PAYLOAD / 10e6
        for _ in range(1 if shared else 4):  # a busy machine makes transfers longer, never shorter
            seconds = transfers([(a, c), (b, d)])
            if seconds < 1.9 * alone:
                break
        assert seconds > 2 * alone if shared else alone < seconds < 1.9 * alone
        assert min(measure_round_trips(b, c, 3)) >= 0.01, "both ways"
        assert sum(each.sent_bytes for each in cluster.report().pairs) > 2 * PAYLOAD
        before = cluster.report()
        transfer(a, b)
        assert sum(each.sent_bytes for each in cluster.report().since(before).pairs) < 0.01 * PAYLOAD, "within a site"


def test_each_direction_of_a_shared_link_is_shared_for_itself() -> None:
    pairs = {((0, 1), 2): Link("1mbit"), (2, 0): Link("5mbit")}
    assert shared_paths(pairs, 3) == {(0, 2): (0, 2), (1, 2): (0, 2)}
    assert both_ways(pairs, 3)[2, 1] == Link("1mbit") and both_ways(pairs, 3)[2, 0] == Link("5mbit")
    pairs = {(0, (1, 2)): Link("1mbit")}
    assert shared_paths(pairs, 3) == {(0, 1): (0, 1), (0, 2): (0, 1), (1, 0): (1, 0), (2, 0): (1, 0)}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0+1-1=1mbit", "must be two different hosts"),
        ("0+4-1=1mbit", "two hosts from 0 to 3, or two tuples"),
        ("0+-1=1mbit", "must be A-B=RATE"),
    ],
)
def test_what_is_no_shared_link(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_pairs([text], 4)


def test_two_links_for_the_same_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="from host 0 to host 2 is given twice"):
        parse_pairs(["0+1-2+3=1mbit", "0-2=2mbit"], 4)
    assert parse_pairs(["0+1-2=1mbit/2ms"], 3) == {((0, 1), 2): Link("1mbit", "2ms")}


def test_a_link_of_a_pair_changes_and_its_queue_drops() -> None:
    with Cluster(2, Link("1gbit"), pairs={(0, 1): Link("1gbit")}) as cluster:
        a, b = cluster.hosts
        cluster.set_pair(0, 1, Link("20mbit", queue_bytes="64kib"))
        transfer(a, b)
        there, _ = cluster.report().pairs
        assert there.queue_drops > 0, "TCP finds the rate by losses"
        assert cluster.report().hosts[1].queue_drops == there.queue_drops
        with pytest.raises(ValueError, match="two hosts from 0 to 1"):
            cluster.set_pair(0, 2, Link("1mbit"))
    with Cluster(2, wire="relay") as cluster, pytest.raises(LabError, match="make the cluster with pairs"):
        cluster.set_pair(0, 1, Link("1mbit"))
