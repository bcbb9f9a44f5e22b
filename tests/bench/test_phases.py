"""Which links a contender sees: those that it is measured on when it takes the model, none while it warms up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import bagua.lab
from bagua.bench.compute import EmulatedModel
from bagua.bench.conditions import parse
from bagua.bench.contenders import Contender
from bagua.bench.hosts import LabHosts
from bagua.bench.measure import Job, measure
from bagua.bench.training import Training, make_optimizer
from bagua.lab import Link
from tests.rank_pool import RankPool


def events() -> list[str]:
    """What happens on a rank while a contender is measured, in order; repeated entries once."""
    seen: list[str] = []

    def prepare(model: EmulatedModel) -> Training:
        seen.append("prepare")
        training = Training.of(model, make_optimizer("sgd", model), lambda: seen.append("close"))
        forward = training.forward

        def stepped() -> Any:
            seen.append("step")
            return forward()

        training.forward = stepped
        return training

    job = Job("layers25m/10", 2, 0.5, 2, 0.1, 0.1, True, 60, (), True)
    contender = Contender("watched", "torch", lambda model, ranks: None, prepare)  # pyright: ignore
    control: Any = dist.new_group(backend="gloo")
    measure(contender, job, control, seen.append)
    return [each for place, each in enumerate(seen) if place == 0 or each != seen[place - 1]]


def test_a_model_is_distributed_over_the_measured_links(pool: RankPool) -> None:
    want = ["setup", "distribute", "prepare", "setup", "step", "measure", "step", "setup", "close"]
    for seen in pool.run(2, events):
        assert seen == want


def test_the_links_of_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[Link] = []
    speeds: list[float] = []
    host = SimpleNamespace(address="", interface="", set_link=links.append, slow=speeds.append)
    cluster = SimpleNamespace(hosts=[host], congestion="cubic", close=lambda: None)
    monkeypatch.setattr(bagua.lab, "Cluster", lambda *args, **options: cluster)
    hosts = LabHosts(1, parse("100mbit/5ms/loss0.01/slow0.5"))
    for phase in ("setup", "distribute", "measure"):
        hosts.set_phase(phase)
    free, distributed, measured = links
    assert free == Link(latency=0.005)
    assert distributed == measured == Link(bandwidth=100e6, latency=0.005, loss=0.01)
    assert speeds == [1.0, 1.0, 0.5]
