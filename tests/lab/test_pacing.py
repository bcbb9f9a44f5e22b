"""Where no namespaces can be had: a rate for every socket, and honest about the rest."""

from __future__ import annotations

import logging
from typing import NoReturn

import pytest

from bagua.lab import Cluster, LabError, Link
from bagua.lab.pacing import LIBRARY
from bagua.lab.traffic import measure_rate
from tests.lab.leftovers import descendants, within
from tests.lab.tries import measured_between

needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="the pacing library was not built")


@needs_library
def test_rate_of_a_socket(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bagua"):
        with Cluster(3, Link("100mbit", "5ms", loss=0.1), mode="pacing", divide=True) as cluster:
            assert "every TCP socket gets the full bandwidth" in caplog.text
            assert "not emulated: latency, loss" in caplog.text
            a, b, _ = cluster.hosts
            assert measured_between(3e7, 6.5e7, lambda: measure_rate(a, b, 0.6, port=cluster.next_port())), "half each"
            for refused in (cluster.hosts[0].cut, lambda: cluster.hosts[0].set_link(Link())):
                with pytest.raises(LabError, match="needs? namespaces"):
                    refused()


def test_pause_and_kill() -> None:
    with Cluster(2, mode="pacing") as cluster:
        a, b = cluster.hosts
        with pytest.raises(LabError, match="partition needs namespaces"):
            cluster.partition([0], [1])
        processes = [host.popen(["sleep", "100"]) for host in (a, b)]
        assert within(60, lambda: all(len(descendants(process.pid)) == 2 for process in processes))
        a.pause()
        a.resume()
        a.slow(0.5)
        assert a.speed_file.read_text() == "0.5"
        a.kill()
        assert processes[0].wait(60) == -9 and processes[1].poll() is None
    assert processes[1].returncode is not None


def test_auto_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: object) -> NoReturn:
        raise LabError("deliberate")

    monkeypatch.setattr("bagua.lab.cluster.Namespaces", refuse)
    with caplog.at_level(logging.WARNING, "bagua"), Cluster(1) as cluster:
        assert cluster.mode == "pacing"
        assert cluster.hosts[0].run(["echo", "here"], timeout=60).stdout == "here\n"
    assert "no namespaces: deliberate" in caplog.text
    with pytest.raises(LabError, match="deliberate"):
        Cluster(1, mode="namespaces")
