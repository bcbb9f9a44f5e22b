"""From reports of hosts to what to change."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bagua.auto.links import Link, Links
from bagua.doctor.clocks import Skew
from bagua.doctor.findings import Site, findings, names_of
from bagua.doctor.forecast import forecast

HOST: dict[str, Any] = {
    "host": "a",
    "interface": "eth0",
    "interface_chosen": False,
    "name_is_loopback": False,
    "mtu": {"eth0": 1500, "lo": 65536},
    "tcp": {
        "rmem_max": 212992,
        "wmem_max": 212992,
        "tcp_rmem_max": 6291456,
        "tcp_wmem_max": 4194304,
        "congestion_control": "cubic",
        "slow_start_after_idle": 0,
    },
    "versions": {"Python": "3.11.2", "torch": "2.13.0", "bagua": "0.10.0", "NCCL": None, "codec kernels": "cpu native"},
    "cuda_devices": 0,
    "bagua_net": {"would_load": False, "reason": "not set"},
    "shm": {"size": 2**33, "free": 2**33},
    "cores": 8,
    "threads": 1,
    "max_open_files": 65536,
}
_NAMES = "abc"


def links(
    rate: float = 1e9, latency_s: float = 1e-4, one_flow: float = 1.0, slow: tuple[int, int] | None = None
) -> Links:
    made = []
    for a in range(3):
        for b in range(3):
            if a != b:
                way = rate / 3 if slow == (a, b) else rate
                made.append(Link(a, b, one_flow * way, way, latency_s))
    return Links(tuple(made), (), 0.1)


def site(changes: dict[str, Any] | None = None, **site_options: Any) -> Site:
    """Three equal hosts; `changes` are of the last one, by the path to an entry."""
    hosts = [{**copy.deepcopy(HOST), "host": name} for name in _NAMES]
    for path, value in (changes or {}).items():
        *above, last = path.split("/")
        place = hosts[2]
        for key in above:
            place = place[key]
        place[last] = value
    return Site(**{"nodes": [[0], [1], [2]], "hosts": hosts, "links": links(), **site_options})


def test_equal_hosts_need_no_change() -> None:
    assert findings(site()) == []


@pytest.mark.parametrize(
    ("changes", "wrong", "said"),
    [
        ({"versions/torch": "2.11.0"}, False, "torch differs: 2.13.0 on 2, 2.11.0 on 1"),
        ({"versions/bagua": "0.9"}, False, "bagua differs"),
        ({"versions/NCCL": "2.27.3"}, True, "NCCL differs"),
        ({"versions/codec kernels": "cpu torch"}, False, "codec kernels differs"),
        ({"mtu/eth0": 9000}, False, "MTU differs"),
        ({"tcp/congestion_control": "bbr"}, False, "tcp_congestion_control differs: cubic on 2, bbr on 1"),
        ({"tcp/rmem_max": 1}, False, "net.core.rmem_max differs"),
        ({"tcp/tcp_rmem_max": 4096}, False, "tcp_rmem"),
        ({"shm/size": 2**26}, False, "64 MiB"),
        ({"shm/free": 0}, True, "/dev/shm is full"),
        ({"shm": None}, False, "no /dev/shm"),
        ({"cores": 4}, False, "CPU cores differ: 8 on 2, 4 on 1"),
        ({"max_open_files": 256}, False, "files may be open"),
        ({"max_open_files": 4}, True, "files may be open"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_said_of_one_host(changes: dict[str, Any], wrong: bool, said: str) -> None:
    (found,) = findings(site(changes))
    assert found.wrong is wrong and found.where == ("c",) and said in found.what and found.do
    assert str(found).startswith("WRONG  c: " if wrong else "CHANGE  c: ")


def test_gpus() -> None:
    found = findings(site({"cuda_devices": 2}))
    assert [(each.wrong, each.where) for each in found] == [(True, ("a", "b"))]
    few = site({"cuda_devices": 1}, nodes=[[0], [1], [2, 3]])
    assert any("2 ranks, but 1 GPUs" in each.what and each.wrong for each in findings(few))


def test_the_plugin_on_some_hosts_only() -> None:
    uneven = site({"bagua_net/would_load": True})
    for host in uneven.hosts:
        host["cuda_devices"] = 1  # pyright: ignore[reportIndexIssue]
    (found,) = findings(uneven)
    assert found.wrong and found.where == ("a", "b") and "Bagua-Net" in found.what


def test_a_loopback_name_counts_only_if_links_fail() -> None:
    assert findings(site({"name_is_loopback": True})) == []
    (found,) = findings(site({"name_is_loopback": True}, links=None))
    assert found.wrong and found.where == ("c",) and "GLOO_SOCKET_IFNAME" in found.do
    assert findings(site({"name_is_loopback": True, "interface_chosen": True}, links=None)) == []


@pytest.mark.parametrize(
    ("skew", "said"), [(Skew(2.0, 0.1), "2.0 s ahead"), (Skew(-2.0, 0.1), "2.0 s behind")], ids=str
)
def test_clocks(skew: Skew, said: str) -> None:
    (found,) = findings(site(clocks=[Skew(0, 0), Skew(0.4, 0.01), skew]))
    assert found.where == ("c",) and said in found.what
    assert findings(site(clocks=[Skew(0, 0), Skew(0, 0), Skew(skew.seconds, 1.9)])) == [], "it may be the measurement"


def test_a_link_with_much_in_flight_needs_buffers_and_no_slow_start() -> None:
    long = links(1e10, 20e-3)
    hosts = findings(site({"tcp/slow_start_after_idle": 1, "mtu/eth0": 1500}, links=long))
    texts = [str(each) for each in hosts]
    assert any("tcp_rmem" in text and "a, b, c" in text for text in texts)
    assert any("slow_start_after_idle=0" in text and "  c: " in text for text in texts)
    assert any("MTU 1500" in text for text in texts)
    assert findings(site({"tcp/slow_start_after_idle": 1}, links=links(1e8, 1e-4))) == []


def test_links_that_differ() -> None:
    (found,) = findings(site(links=links(slow=(0, 2))))
    assert found.where == ("a", "c") and "333 Mbit/s from a to c" in found.what
    (found,) = findings(site(links=links(one_flow=0.5)))
    assert "one connection" in found.what and found.where == ("a", "b", "c")
    rates = [(a, b, 3e8 if 2 in (a, b) else 1e9) for a in range(3) for b in range(3) if a != b]
    slow_host = Links(tuple(Link(a, b, rate, rate, 1e-4) for a, b, rate in rates), (), 0.1)
    (found,) = findings(site(links=slow_host))
    assert found.where == ("c",) and "300 Mbit/s at most" in found.what


def test_threads_and_cores() -> None:
    assert any("share 1 CPU core" in e.what for e in findings(site({"cores": 1}, nodes=[[0], [1], [2, 3]])))
    assert any("OMP_NUM_THREADS=4" in e.do for e in findings(site({"threads": 8}, nodes=[[0], [1], [2, 3]])))


def test_what_would_fail_comes_first_and_a_poor_report_is_no_error() -> None:
    found = findings(site({"versions/torch": "1", "shm/free": 0}))
    assert [each.wrong for each in found] == [True, False]
    findings(Site([[0], [1]], [{}, {}]))
    assert names_of([{}, {}]) == ["?#0", "?#1"]


def test_auto_is_predicted_by_its_own_rules() -> None:
    nodes = [[0], [1], [2]]
    slow = forecast("25m", 0.1, links(1e8, 5e-3), nodes, 4, gpu=False)
    fast = forecast("25m", 0.1, links(1e12, 1e-6), nodes, 4, gpu=True)
    assert [each.optimizer for each in slow] == ["sgd", "adam"]
    assert all(each.chosen != "gradient_allreduce" and each.step_s < 0.95 * each.exact_s for each in slow)
    assert {each.chosen for each in fast} == {"gradient_allreduce"}
