"""Strings of the lab: links, events, commands."""

from __future__ import annotations

import sys

import pytest

from bagua.lab import Cluster, Link
from bagua.lab.events import Event, parse_event
from bagua.lab.link import bits_per_second, num_bytes, seconds
from bagua.lab.pairs import both_ways, parse_pairs
from bagua.lab.rendezvous import command_for


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100mbit", 10**8),
        ("1gbit", 10**9),
        ("2.5 Gbps", 2_500_000_000),
        ("10mbit/s", 10**7),
        ("64kbit", 64_000),
        (1e6, 10**6),
        ("1000000bit", 10**6),
    ],
)
def test_rates(text: str | float, rate: int) -> None:
    assert bits_per_second(text) == rate


@pytest.mark.parametrize(
    "text", ["fast", "100", "1gb", "-1mbit", "0bit", "1 xbit", "", None, True, "1e99gbit", float("nan")]
)
def test_wrong_rates_name_the_argument(text: str) -> None:
    with pytest.raises(ValueError, match="bandwidth must be"):
        Link(bandwidth=text if text is not None else "none")
    with pytest.raises(ValueError, match="flow_bandwidth must be"):
        Link(flow_bandwidth=text if text is not None else "none")


def test_durations_and_sizes() -> None:
    assert seconds("2ms", "latency") == 0.002 and seconds("500us", "latency") == 0.0005
    assert seconds("0", "latency") == 0 and seconds(0.1, "latency") == 0.1
    assert num_bytes("2mb", "queue_bytes") == 2_000_000 and num_bytes("1MiB", "queue_bytes") == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"latency": "2"}, "latency must be a duration with a unit"),
        ({"latency": "2 lightyears"}, "latency must be a duration"),
        ({"latency": -1}, "latency must be between 0 and 60 s"),
        ({"jitter": "soon"}, "jitter must be a duration"),
        ({"loss": 1.0}, "loss must be a probability"),
        ({"loss": "a lot"}, "loss must be a probability"),
        ({"queue_bytes": 1500}, "queue_bytes must be at least 64 KiB"),
        ({"queue_bytes": "2 barrels"}, "queue_bytes must be a size"),
    ],
)
def test_wrong_links_name_the_argument(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link(**arguments)


def test_default_queue_grows_with_the_path() -> None:
    assert Link("100mbit", "1ms").settings()[5] == 1_000_000
    assert Link("10gbit", "10ms").settings()[5] == 2 * 12_500_000
    assert Link().unlimited and Link(latency="0ms").unlimited and not Link(loss=0.1).unlimited


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 0}, "hosts must be 1 to 64"),
        ({"hosts": 65}, "hosts must be 1 to 64"),
        ({"hosts": 2, "mode": "magic"}, "mode must be one of"),
        ({"hosts": 2, "wire": "string"}, "wire must be one of"),
        ({"hosts": 2, "wire": "veth", "link": Link("1gbit")}, "cannot limit a link"),
        ({"hosts": 2, "wire": "tbf", "link": Link("1gbit", "1ms")}, 'emulates only a bandwidth.*wire="relay"'),
        ({"hosts": 2, "congestion": "cubic bbr"}, "congestion must name"),
        ({"hosts": 2, "congestion": "reno", "mode": "pacing"}, "congestion cannot be set"),
    ],
)
def test_wrong_clusters(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(**arguments)


def test_events() -> None:
    assert parse_event("5s:cut:1", 2) == Event(5.0, "cut", 1)
    assert parse_event("500ms:slow:0=0.5", 2) == Event(0.5, "slow", 0, "0.5")
    assert parse_event("1s:bandwidth:0=1gbit", 2).value == "1gbit"
    times = {"0": 0, "61s": 61, "5m": 300, "90min": 5400, "12h": 43200}
    assert [parse_event(f"{at}:cut:0", 1).at_s for at in times] == list(times.values())


@pytest.mark.parametrize(
    "text",
    ["cut", "5s:cut", "5s:explode:1", "5s:cut:2", "5s:cut:x", "5s:slow:1", "5s:slow:1=2", "5s:cut:1=3", "5:cut:1",
     "5s:bandwidth:1=much"],
)  # fmt: skip
def test_wrong_events(text: str) -> None:
    with pytest.raises(ValueError, match=r"--at|bandwidth must"):
        parse_event(text, 2)


STATIC = ["--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29500"]
C10D = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:29500", "--rdzv-id", "lab29500"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["torchrun", "a.py"], ["torchrun", "--nnodes", "3", *STATIC, "a.py"]),
        (["/x/bagua", "run", "a.py", "-v"], ["/x/bagua", "run", "--nnodes", "3", *STATIC, "a.py", "-v"]),
        (
            ["python3", "-u", "-m", "bagua.distributed.run", "a.py"],
            ["python3", "-u", "-m", "bagua.distributed.run", "--nnodes", "3", *STATIC, "a.py"],
        ),
        (
            [sys.executable, "-m", "bagua.cli.main", "run", "a.py"],
            [sys.executable, "-m", "bagua.cli.main", "run", "--nnodes", "3", *STATIC, "a.py"],
        ),
        (["python", "-m", "bagua", "run", "a.py"], ["python", "-m", "bagua", "run", "--nnodes", "3", *STATIC, "a.py"]),
        (["python", "-m", "bagua", "doctor"], ["python", "-m", "bagua", "doctor"]),
        (["torchrun", "--nnodes", "2:3", "a.py"], ["torchrun", *C10D, "--nnodes", "2:3", "a.py"]),
        (
            ["bagua", "run", "--fault-tolerant", "a.py"],
            [sys.executable, "-m", "bagua.cli.main", "run", "--nnodes", "3", *C10D, "--fault-tolerant", "a.py"],
        ),
        (["torchrun", "--nnodes=1:3", "a.py"], ["torchrun", *C10D, "--nnodes=1:3", "a.py"]),
        (["torchrun", "--standalone", "a.py"], ["torchrun", "--standalone", "a.py"]),
        (["torchrun", "a.py", "--nnodes", "7"], ["torchrun", "--nnodes", "3", *STATIC, "a.py", "--nnodes", "7"]),
        (["python", "a.py", "-m", "torch.distributed.run"], ["python", "a.py", "-m", "torch.distributed.run"]),
        (["sh", "-c", "true"], ["sh", "-c", "true"]),
    ],
)
def test_commands_get_the_rendezvous(words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # where there is no `bagua`, this interpreter's is meant
    assert command_for(words, 3, 1, "10.0.0.1", 29500) == expected


def test_ranks_per_host() -> None:
    assert command_for(["torchrun", "a.py"], 1, 0, "h", 1, 2)[1:3] == ["--nproc-per-node", "2"]
    assert "2" not in command_for(["torchrun", "--nproc_per_node=4", "a.py"], 1, 0, "h", 1, 2)
    with pytest.raises(ValueError, match="nproc_per_node needs"):
        command_for(["sh"], 1, 0, "h", 1, 2)


def test_links_of_pairs() -> None:
    found = parse_pairs(["0-1=50mbit/20ms", "2-0=1gbit", "0-2=10mbit"], 3)
    assert found == {(0, 1): Link("50mbit", "20ms"), (2, 0): Link("1gbit"), (0, 2): Link("10mbit")}
    assert both_ways(found, 3) == {**found, (1, 0): Link("50mbit", "20ms")}, "unless the way back is given too"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["0-1"], "--link must be A-B=RATE"),
        (["0-1=50mbit/2ms/3"], "--link must be A-B=RATE"),
        (["0-1=fast"], "--link 0-1=fast: bandwidth must be"),
        (["0-1=1gbit/2"], "--link 0-1=1gbit/2: latency must be"),
        (["0-3=1gbit"], r"\(0, 3\) must be two hosts from 0 to 2"),
        (["1-1=1gbit"], "two different hosts"),
        (["0-1=1gbit", "0-1=2gbit"], "from host 0 to host 1 is given twice"),
    ],
)
def test_wrong_links_of_pairs(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_pairs(texts, 3)


def test_clusters_refuse_what_a_pair_cannot_have() -> None:
    with pytest.raises(ValueError, match="a pair has a bandwidth, a latency and a queue"):
        Cluster(2, pairs={(0, 1): Link(loss=0.1)})
    with pytest.raises(ValueError, match='wire="tbf" cannot emulate pairs'):
        Cluster(2, pairs={(0, 1): Link("1gbit")}, wire="tbf")
    with pytest.raises(ValueError, match='mode="pacing"'):
        Cluster(2, pairs={(0, 1): Link("1gbit")}, mode="pacing")
    with pytest.raises(TypeError, match="must be a bagua.lab.Link, not str"):
        Cluster(2, pairs={(0, 1): "1gbit"})  # type: ignore[dict-item]
