"""The links do what they say, and hosts can be cut, paused, slowed and killed.

Rates and latencies are what is under test here, so they are asserted, with room for a busy machine.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bagua.lab import Cluster, Host, LabError, Link
from bagua.lab.supervisor import load_relay
from bagua.lab.traffic import measure_rate, measure_round_trips
from tests.lab.leftovers import assert_nothing_left, devices, mine, within
from tests.lab.tries import measured_between

pytestmark = pytest.mark.usefixtures("namespaces")

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])).recv(1)"
LISTEN = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    while True:
        server.accept()[0].sendall(b"x")
"""
BLAST = """
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end = time.monotonic() + 0.5
while time.monotonic() < end:
    sock.sendto(bytes(1400), (sys.argv[1], 7001))
    time.sleep(0.0002)
"""

CUT_BLAST = """
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.sendto(b"x", (sys.argv[1], 7001))
sock.setsockopt(socket.SOL_UDP, 103, 1400)  # UDP_SEGMENT
for _ in range(int(sys.argv[2])):
    sock.sendto(bytes(14000), (sys.argv[1], 7001))
    time.sleep(0.01)  # a queue that is full drops datagrams
"""


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *args]


def reaches(sender: Host, receiver: Host, timeout_s: float = 0.5) -> bool:
    return sender.run(python(CONNECT, receiver.address, str(timeout_s)), timeout=60).returncode == 0


def listen(host: Host) -> None:
    process = host.popen(python(LISTEN), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()


@pytest.mark.parametrize("wire", ["tap", "packet"])
def test_rate_and_latency(wire: str) -> None:
    with Cluster(2, Link("100mbit", "5ms"), wire=wire) as cluster:
        a, b = cluster.hosts
        assert cluster.wire == wire
        trips: list[float] = []

        def median_trip() -> float:
            trips[:] = measure_round_trips(a, b, 15)
            return statistics.median(trips)

        assert measured_between(0.01, 0.02, median_trip)
        assert min(trips) >= 0.01, "never faster than the light in the cable"
        before = cluster.report()
        assert measured_between(0.8e8, 1.1e8, lambda: measure_rate(a, b, 0.5))
        report = cluster.report().since(before)
        assert report.hosts[0].sent_bytes > 0.4 * 0.8e8 / 8
        assert report.hosts[1].received_bytes == pytest.approx(report.hosts[0].sent_bytes, rel=0.2)
        assert report.relay_cpu_s > 0 and report.frames > 0


@pytest.mark.parametrize("wire", ["tap", "packet"])
def test_a_datagram_that_is_to_be_cut_counts_as_its_packets(wire: str) -> None:
    with Cluster(2, Link("1gbit", "1ms"), wire=wire) as cluster:
        a, b = cluster.hosts
        a.run(python(CUT_BLAST, b.address, "0"), timeout=60)  # the neighbour's address is asked for
        before = cluster.report()
        assert a.run(python(CUT_BLAST, b.address, "20"), timeout=60).returncode == 0
        expected = 20 * 10 * (1400 + 14 + 20 + 8)
        assert within(20, lambda: cluster.report().since(before).hosts[0].sent_bytes >= expected)
        assert cluster.report().since(before).hosts[0].sent_bytes < 1.05 * expected


def test_congestion_control() -> None:
    ask = python("print(open('/proc/sys/net/ipv4/tcp_congestion_control').read())")
    with Cluster(2, congestion="reno") as cluster:
        assert cluster.congestion == "reno"
        for host in cluster.hosts:
            answer = host.run(ask, timeout=60, stdout=subprocess.PIPE, text=True).stdout
            assert answer.strip() == "reno"
    with pytest.raises(LabError, match="no congestion control 'no_such_one', only"):
        Cluster(2, congestion="no_such_one")


def test_links_change_while_running() -> None:
    with Cluster(2, Link("20mbit"), wire="relay") as cluster:
        a, b = cluster.hosts
        assert measured_between(1.6e7, 2.2e7, lambda: measure_rate(a, b, 0.4))
        b.set_link(Link("100mbit"))
        a.set_link(Link("100mbit", flow_bandwidth="50mbit"))
        assert measured_between(3.7e7, 5.5e7, lambda: measure_rate(a, b, 0.4)), "the cap of one connection"
        assert measured_between(7.5e7, 1.1e8, lambda: measure_rate(a, b, 0.5, streams=4)), "several share the link"
        a.set_link(Link("100mbit", "20ms", jitter="10ms"))
        trips = measure_round_trips(a, b, 10)
        assert min(trips) > 0.0199, "half of the latency is each link's"
        assert max(trips) - min(trips) > 0.0005, "jitter"


UNACKED = """
import socket, struct, sys, time
sock = socket.create_connection((sys.argv[1], 7004))
sock.setblocking(False)
end, most = time.monotonic() + 1.5, 0
while time.monotonic() < end:
    try:
        sock.send(bytes(1 << 18))
    except BlockingIOError:
        time.sleep(0.01)
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    most = max(most, struct.unpack_from("I", info, 24)[0] * struct.unpack_from("I", info, 16)[0])
print(most)
"""


@pytest.mark.usefixtures("token_buckets")
def test_a_slow_uplink_holds_sockets_back() -> None:
    """As a network card does: what waits for it counts as unsent, and is a few frames instead of megabytes."""
    sink = LISTEN.replace("7000", "7004").replace('sendall(b"x")', "makefile().read()")
    with Cluster(2, Link(), wire="relay") as cluster:
        a, b = cluster.hosts
        server = b.popen(python(sink), stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline()
        server.stdout.close()
        for host in (a, b):
            host.set_link(Link("20mbit", "1ms"))
        unacked = python(UNACKED, b.address)
        assert measured_between(0, 300_000, lambda: int(a.run(unacked, timeout=60).stdout))


@pytest.mark.parametrize(("wire", "link"), [("veth", None), ("tbf", Link("100mbit")), ("relay", Link("100mbit"))])
def test_a_partition_is_silent_and_heals(wire: str, link: Link | None) -> None:
    """A connection between two parts stalls and goes on; a host that is in no part reaches both."""
    echo = """
import socket, sys
with socket.create_server(("", 7005)) as server:
    print("ready", flush=True)
    sock = server.accept()[0]
    while data := sock.recv(1):
        sock.sendall(data)
"""
    ask = """
import socket, sys
sock = socket.create_connection((sys.argv[1], 7005))
for line in sys.stdin:
    sock.settimeout(float(line))
    try:
        sock.sendall(b"x")
        print(sock.recv(1) == b"x", flush=True)
    except TimeoutError:
        print("timeout", flush=True)
"""
    try:
        cluster = Cluster(4, link, wire=wire)
    except LabError as error:
        pytest.skip(str(error))
    with cluster:
        a, b, c, d = cluster.hosts
        server = b.popen(python(echo), stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        client = a.popen(python(ask, b.address), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        lines, answers = client.stdin, client.stdout
        assert lines is not None and answers is not None

        def answer(timeout_s: float) -> str:
            lines.write(f"{timeout_s}\n")
            lines.flush()
            return answers.readline().strip()

        assert answer(60) == "True"
        for host in (b, c, d):
            listen(host)
        cluster.partition([0, 3], [1])
        assert answer(0.5) == "timeout"
        assert not reaches(a, b) and not reaches(b, d) and reaches(a, d, 30) and reaches(a, c, 30) and reaches(c, b, 30)
        cluster.partition([0], [3])
        assert not reaches(a, d) and reaches(a, b, 30)
        cluster.heal()
        assert answer(60) == "True" and reaches(a, d, 30)
        for pipe in (lines, answers, server.stdout):
            pipe.close()


def test_a_partition_of_other_hosts_is_refused() -> None:
    with Cluster(2) as cluster:
        for parts in (([0], [0, 1]), ([0, 0],), ([2],), ([-1],)):
            with pytest.raises(ValueError, match="hosts from 0 to 1, each once"):
                cluster.partition(*parts)


def test_loss_loses_packets() -> None:
    with Cluster(2, Link(loss=0.05), seed=3) as cluster:
        a, b = cluster.hosts
        # A sender that waits to repeat a packet fills no window of a measurement; not all are so.
        assert measured_between(1e6, math.inf, lambda: measure_rate(a, b, 1.0)), "TCP repairs it"
        reports = cluster.report().hosts
        lost = sum(host.loss_drops for host in reports)
        assert lost > 0
        mean_bytes = reports[0].sent_bytes / 1514
        assert 0.02 < reports[0].loss_drops / mean_bytes < 0.1, "of packets, not of frames of 64 KB"


def test_a_full_queue_drops() -> None:
    with Cluster(3, Link(latency="0.1ms")) as cluster:
        a, b, c = cluster.hosts
        c.set_link(Link("1mbit", queue_bytes="64kib"))
        senders = [host.popen(python(BLAST, c.address)) for host in (a, b)]
        assert [sender.wait(60) for sender in senders] == [0, 0]
        report = cluster.report()
        assert report.hosts[2].queue_drops > 0 and report.hosts[1].queue_drops == 0


def test_cut_and_restore() -> None:
    with Cluster(3, wire="relay") as cluster:
        a, b, c = cluster.hosts
        listen(c)
        assert reaches(a, c, 5)
        c.cut()
        assert not reaches(a, c)
        assert cluster.report().hosts[0].cut_drops > 0
        listen(b)
        assert reaches(a, b, 5), "the others still talk"
        c.restore()
        assert within(60, lambda: reaches(a, c))


def state(process: subprocess.Popen) -> str:
    """Of the command that a process of `Host.popen` stands for."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return Path(f"/proc/{children[0]}/stat").read_text().rpartition(")")[2].split()[0] if children else ""


def test_pause_resume_slow_kill() -> None:
    with Cluster(2) as cluster:
        a, b = cluster.hosts
        sleeper = a.popen(["sleep", "100"])
        other = b.popen(["sleep", "100"])
        assert within(60, lambda: state(sleeper) == "S" and state(other) == "S")
        a.pause()
        assert within(60, lambda: state(sleeper) == "T") and state(other) == "S"
        a.resume()
        assert within(60, lambda: state(sleeper) == "S")
        busy = python("import time\nend = time.time() + 0.8\nwhile time.time() < end: pass\nprint(time.process_time())")
        a.slow(0.25)
        assert a.speed_file.read_text() == "0.25"
        # It is stopped a moment too late now and then.
        assert any(float(a.run(busy, timeout=60).stdout) < 0.5 for _ in range(10))
        a.slow(1.0)
        assert a.speed_file.read_text() == "1.0"
        a.kill()
        assert sleeper.wait(60) == -9
        assert a.run(["echo", "again"], timeout=60).stdout == "again\n"
        assert other.poll() is None
        with pytest.raises(ValueError, match="speed must be from 0.01 to 1"):
            a.slow(0)


def test_signals_and_codes_pass_through() -> None:
    with Cluster(1) as cluster:
        host = cluster.hosts[0]
        assert host.run(["sh", "-c", "exit 7"], timeout=60).returncode == 7
        assert host.run(["sh", "-c", "kill -ABRT $$"], timeout=60).returncode == -6
        missing = host.run(["no-such-command"], timeout=60)
        assert missing.returncode == 127 and "no-such-command" in missing.stderr
        process = host.popen(["sh", "-c", 'trap "exit 5" TERM; echo up; while :; do sleep 0.05; done'], stdout=-1)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(60) == 5
        process.stdout.close()
        with pytest.raises(subprocess.TimeoutExpired):
            host.run(["sleep", "100"], timeout=0.3)


def test_a_host_is_a_machine_of_its_own(tmp_path: Path) -> None:
    with Cluster(2) as cluster:
        a, b = cluster.hosts
        assert cluster.wire == "veth"
        listen(a)
        listen(b)  # the same port
        assert reaches(a, b, 5) and reaches(b, a, 5)
        shown = a.run(
            ["sh", "-c", "hostname; cat /etc/hosts; pwd"], timeout=60, cwd=str(tmp_path), env={"X": "y"}
        ).stdout
        assert shown.startswith("host0\n") and f"{b.address} host1" in shown and shown.endswith(f"{tmp_path}\n")
        outside = python("import socket; socket.create_connection(('192.0.2.1', 80), timeout=3)")
        assert "unreachable" in a.run(outside, timeout=60).stderr, "no way out"
        assert sum(host.sent_bytes for host in cluster.report().hosts) > 0
        for refused in (a.cut, a.restore, lambda: a.set_link(Link("1gbit"))):
            with pytest.raises(LabError, match="needs the relay"):
                refused()
        assert "lab0" not in [name for _, name in devices()], "nothing shows outside"
    with pytest.raises(LabError, match="has ended"):
        a.popen(["true"])
    with pytest.raises(LabError, match="has ended"):
        cluster.report()


def test_nothing_is_left_after_an_exception() -> None:
    before = devices()
    cluster = Cluster(3, Link("1gbit"))
    spaces = mine(cluster)
    assert len(spaces) == 4, "three hosts and the switch"
    process = cluster.hosts[1].popen(["sh", "-c", "setsid sleep 1000 & setsid setsid sleep 1000 & wait"])
    assert within(60, lambda: state(process) == "S")
    with pytest.raises(ZeroDivisionError), cluster:
        raise ZeroDivisionError
    assert_nothing_left(spaces, cluster.folder)
    assert process.returncode is not None
    assert devices() == before


@pytest.mark.slow
def test_two_clusters_at_once() -> None:
    with Cluster(2, Link("1gbit")) as first, Cluster(2, Link("1gbit")) as second:
        listen(first.hosts[1])
        assert reaches(first.hosts[0], first.hosts[1], 5)
        assert not reaches(second.hosts[0], second.hosts[1])
        first.close()
        listen(second.hosts[1])
        assert reaches(second.hosts[0], second.hosts[1], 5)


def test_missing_relay_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bagua.lab.supervisor.LIBRARY", tmp_path / "_relay.so")
    with pytest.raises(LabError, match=r"compiler .* build_ext --inplace"):
        load_relay()


def test_launch_sets_up_the_rendezvous() -> None:
    with Cluster(3) as cluster:
        code = (
            "import os; print(*(os.environ[k] for k in ('NODE_RANK', 'NNODES', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME')))"
        )
        processes = cluster.launch(python(code), stdout=subprocess.PIPE, text=True)
        outputs = [process.communicate(timeout=60)[0] for process in processes]
        assert outputs == [f"{index} 3 {cluster.hosts[0].address} lab0\n" for index in range(3)]


@pytest.mark.slow
def test_small_messages_pass_beside_a_full_stream() -> None:
    """Small messages pass while the same uplink is full: its flows take turns."""
    sink = """
import socket
server = socket.create_server(("", 7003))
print(flush=True)
stream = server.accept()[0]
while stream.recv(1 << 20):
    pass
"""
    with Cluster(3, Link("50mbit", "1ms")) as cluster:
        a, b, c = cluster.hosts
        pump = (
            "import socket, sys\ns = socket.create_connection((sys.argv[1], 7003))\nwhile True: s.send(bytes(1 << 20))"
        )
        server = b.popen(python(sink), stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline()
        server.stdout.close()
        a.popen(python(pump, b.address))
        time.sleep(0.3)
        assert statistics.median(measure_round_trips(a, c, 15)) < 0.05
