"""Links that the kernel limits by itself, without a relay.

Rates are what is under test here, so they are asserted, with room for a busy machine.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from bagua.lab import Cluster, Host, LabError, Link, Report, namespaces
from bagua.lab.events import parse_event, wire_for
from bagua.lab.main import main
from bagua.lab.traffic import measure_rate
from tests.lab.leftovers import within
from tests.lab.test_cluster import BLAST
from tests.lab.tries import measured_between

pytestmark = pytest.mark.usefixtures("token_buckets")

SINK = """
import socket, threading
def drain(stream):
    while stream.recv(1 << 20): pass
with socket.create_server(("", 7000)) as server:
    print(flush=True)
    while True:
        threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()
"""
SOURCE = """
import socket, sys, threading
def pump():
    stream = socket.create_connection((sys.argv[1], 7000))
    while True: stream.send(bytes(1 << 18))
threads = [threading.Thread(target=pump) for _ in range(int(sys.argv[2]))]
[thread.start() for thread in threads]
"""


def python(code: str, *args: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *map(str, args)]


def listen(host: Host) -> None:
    process = host.popen(python(SINK), stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()


def stream(receiver: Host, *senders: Host, num: int = 1) -> None:
    for sender in senders:
        sender.popen(python(SOURCE, receiver.address, num))


def received_mbit(cluster: Cluster, receiver: Host, seconds: float = 0.4) -> float:
    """What its device takes in, headers included."""
    before = cluster.report()
    time.sleep(seconds)
    report = cluster.report().since(before)
    return 8e-6 * report.hosts[receiver.index].received_bytes / report.wall_s


def settles_at(cluster: Cluster, receiver: Host, mbit: float) -> bool:
    """It gets that and no more once streams have begun, as far as a busy machine lets them send, and be measured."""
    window_s, bucket_mbit = 0.25, 8e-6 * 72_000  # a full bucket or a frame more falls into one window than into another
    for _ in range(12):
        rate = received_mbit(cluster, receiver, window_s)
        if 0.85 * mbit < rate < 1.03 * mbit + 2 * bucket_mbit / window_s:
            return True
    return False


def all_send(report: Report, senders: tuple[Host, ...]) -> bool:
    return all(report.hosts[sender.index].sent_bytes > 100_000 for sender in senders)


@pytest.mark.parametrize("mbit", [100, 1000])
def test_rate(mbit: int) -> None:
    """Of one stream and of four, then of two senders: in sum the receiver's."""
    with Cluster(3, Link(f"{mbit}mbit")) as cluster:
        assert cluster.wire == "tbf"
        a, b, c = cluster.hosts
        listen(b)
        for senders, num in (((a,), 1), ((a,), 4), ((a, c), 2)):
            before = cluster.report()
            stream(b, *senders, num=num)
            assert within(20, lambda senders=senders, before=before: all_send(cluster.report().since(before), senders))
            assert settles_at(cluster, b, mbit), (senders, num)
            for sender in senders:
                sender.kill()
        report = cluster.report()
        assert report.wire == "tbf" and report.relay_cpu_s == 0 and report.late_frames is None
        assert report.frames > 0 and not report.machine_limited


def test_frames_take_the_time_of_their_packets() -> None:
    """Of a packet of 1514 bytes 1448 are payload, so there are 95.6 Mbit/s of it."""
    with Cluster(2, Link("100mbit"), wire="tbf") as cluster:
        a, b = cluster.hosts
        assert measured_between(0.85e8, 0.965e8, lambda: measure_rate(a, b, 1.0))


def test_another_bandwidth() -> None:
    with Cluster(2, Link("1gbit")) as cluster:
        a, b = cluster.hosts
        listen(b)
        stream(b, a)
        assert settles_at(cluster, b, 1000)
        b.set_link(Link("50mbit"))
        time.sleep(0.1)
        assert settles_at(cluster, b, 50)
        b.set_link(Link())
        a.set_link(Link("200mbit"))
        time.sleep(0.1)
        assert settles_at(cluster, b, 200)
        a.set_link(Link())
        assert within(60, lambda: received_mbit(cluster, b, 0.1) > 1500), "no limit"
        for link in (Link("1gbit", "1ms"), Link(jitter="1ms"), Link(loss=0.1), Link("1gbit", flow_bandwidth="1mbit")):
            with pytest.raises(LabError, match='wire "tbf" emulates only a bandwidth.*wire="relay"'):
                a.set_link(link)


def test_cut_and_restore() -> None:
    with Cluster(3, Link("100mbit")) as cluster:
        a, b, c = cluster.hosts
        for host in (a, b):
            listen(host)
        stream(b, a)
        assert settles_at(cluster, b, 100)
        a.cut()
        a.cut()
        assert within(60, lambda: received_mbit(cluster, b, 0.1) == 0), "what a sends is lost"
        stream(a, c)
        assert within(60, lambda: cluster.report().hosts[0].cut_drops > 1)
        assert c.run(python(SOURCE.replace("while True: ", ""), b.address, 1), timeout=60).returncode == 0, (
            "others talk"
        )
        lost = cluster.report().hosts[0].cut_drops
        a.restore()
        assert within(60, lambda: received_mbit(cluster, b, 0.1) > 50), "the connection goes on"
        assert within(60, lambda: received_mbit(cluster, a, 0.1) > 50), "the other one is made at last"
        assert cluster.report().hosts[0].cut_drops >= lost > 0
        assert cluster.report().hosts[1].cut_drops == 0


def test_a_full_queue_drops() -> None:
    with Cluster(3, Link("1gbit")) as cluster:
        a, b, c = cluster.hosts
        c.set_link(Link("1mbit", queue_bytes="64kib"))
        senders = [host.popen(python(BLAST, c.address)) for host in (a, b)]
        assert [sender.wait(60) for sender in senders] == [0, 0]
        report = cluster.report()
        sent = sum(host.sent_bytes for host in report.hosts[:2])
        assert report.hosts[2].queue_drops > 0 and report.hosts[1].queue_drops == 0
        passed = 65536 + 2 * 72_000 + 1e6 / 8  # the queue, the bucket, and a second
        assert report.hosts[2].queue_drops > (sent - passed) / 1442


def test_what_auto_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(1, Link("1gbit", queue_bytes="1mb")) as cluster:
        assert cluster.wire == "tbf"
    with Cluster(1, Link("1gbit", "1ms")) as cluster:
        assert cluster.wire in ("tap", "packet")
    broken = "import bagua.lab.token_bucket as bucket; bucket._PARMS = 77; from bagua.lab.supervisor"
    monkeypatch.setattr(namespaces, "_BOOT", namespaces._BOOT.replace("from bagua.lab.supervisor", broken))
    with Cluster(2, Link("100mbit")) as cluster:
        a, b = cluster.hosts
        assert cluster.wire in ("tap", "packet"), "the kernel refuses"
        listen(b)
        stream(b, a)
        assert within(60, lambda: received_mbit(cluster, b, 0.1) > 50)
    with pytest.raises(LabError, match='the kernel cannot limit links here .*wire="tbf"'):
        Cluster(2, Link("100mbit"), mode="namespaces", wire="tbf")


@pytest.mark.parametrize(
    ("link", "texts", "wire"),
    [
        (Link("1gbit"), ["1s:latency:0=1ms"], "relay"),
        (Link("1gbit"), ["1s:cut:0", "2s:restore:0", "1s:bandwidth:0=1mbit", "1s:slow:0=0.5"], "auto"),
        (Link(), ["1s:cut:0"], "relay"),
        (Link(), ["1s:bandwidth:0=1mbit"], "relay"),
        (Link(), ["1s:slow:0=0.5"], "auto"),
    ],
)
def test_events_decide(link: Link, texts: list[str], wire: str) -> None:
    assert wire_for([parse_event(text, 1) for text in texts], link) == wire


@pytest.mark.parametrize(("asked", "text"), [("tbf", "1s:latency:0=1ms"), ("veth", "1s:cut:0")])
def test_events_that_a_wire_cannot_do(asked: str, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--hosts", "1", "--wire", asked, "--at", text, "--", "true"]) == 2
    assert f"wire {asked} cannot do {text.split(':')[1]}: use --wire relay" in capfd.readouterr().err
