"""Links of pairs of hosts: what the relay is told, what it carries, and that it is no faster."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from bagua.lab import Cluster, Host, LabError, Link
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
    receiving = receiver.popen([sys.executable, "-I", "-S", "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    assert receiving.stdout is not None and read_line(receiving.stdout, "receiver") == "ready\n"
    started = time.monotonic()
    sending = sender.run([sys.executable, "-I", "-S", "-c", SEND, receiver.address, str(PAYLOAD)], timeout=60)
    answer, seconds = read_line(receiving.stdout, "transfer's end"), time.monotonic() - started
    receiving.stdout.close()
    assert sending.returncode == 0 and int(answer) == PAYLOAD and receiving.wait(60) == 0
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
        assert PAYLOAD < there.sent_bytes < 1.05 * PAYLOAD, "payload, and the headers of TCP"
        assert 0 < back.sent_bytes < 0.05 * PAYLOAD, "acknowledgements"
        assert there.queue_drops == back.queue_drops == 0
        assert seconds > 8 * PAYLOAD / 10e6, "no faster than the link"
        assert min(measure_round_trips(a, b, 3)) >= 0.017, "the latency of the pair there, of the hosts back"
        mid = cluster.report()
        transfer(a, c)
        assert sum(each.sent_bytes for each in cluster.report().since(mid).pairs) < 0.01 * PAYLOAD, "another link"


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
