"""What is reported is what happened."""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

import bagua
from bagua.exchanges import AllReduce
from tests.engine.training import Net, batch, distributed, train
from tests.rank_pool import RankPool


def linear() -> nn.Module:
    return nn.Linear(6, 4096, bias=False)


def count(algorithm: str, options: dict) -> bagua.Stats:
    model, optimizer = distributed(linear, algorithm, **options)
    empty = bagua.stats(model)
    assert empty.steps == 0 and empty.total.bytes_sent == 0 and empty.last.compression_ratio == 1.0
    train(model, optimizer, range(3))
    return bagua.stats(model)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_bytes_and_ratio(pool: RankPool, algorithm: str, size: int) -> None:
    n = 6 * 4096
    for stats in pool.run(size, count, algorithm, {}):
        expected = bagua.algorithms.get(algorithm).bytes_per_rank(n, size)
        assert stats.steps == 3 and stats.num_buckets == 1 and stats.bucket_bytes == (4 * n,)
        assert abs(stats.last.bytes_sent - expected) <= 1
        assert stats.total.bytes_sent == 3 * stats.last.bytes_sent
        assert stats.last.payload_bytes == 4 * n and stats.last.launches == 1
        assert (stats.last.comm_s > 0) == (stats.total.exposed_s > 0) == (stats.last.bits_per_s > 0) == (size > 1)
        want = {"gradient_allreduce": 1.0, "bytegrad": 4 / (1 + 8 / 1024)}[algorithm] if size > 1 else 1.0
        assert stats.last.compression_ratio == pytest.approx(want, rel=1e-3)
        assert stats.algorithm.startswith(
            {"gradient_allreduce": "GradientAllReduce", "bytegrad": "ByteGrad"}[algorithm]
        )


class Slow(AllReduce):
    """An all-reduce that takes 50 ms."""

    def run(self, x_N, state, groups, step) -> None:
        time.sleep(0.05)
        super().run(x_N, state, groups, step)


class Slowly(bagua.algorithms.GradientAllReduce):
    """Uses `Slow`."""

    exchange = Slow()  # pyright: ignore[reportAssignmentType]


class Delay(torch.autograd.Function):
    """Passes through; its backward takes 150 ms."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(0.15)
        return grad


class Overlapping(nn.Module):
    """One layer whose exchange can hide behind the rest of the backward pass, and one whose exchange cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.second(Delay.apply(self.first(x)))


def hidden() -> tuple[list[bagua.Stats], list[bagua.Stats]]:
    """Of the first step of 4 modules, and of 7 later steps."""
    algorithm: Any = Slowly()
    modules = [distributed(Overlapping, algorithm, bucket_bytes=1, num_lanes=1) for _ in range(4)]
    first: list[bagua.Stats] = []
    for model, optimizer in modules:
        train(model, optimizer, [0])
        first.append(bagua.stats(model))
    model, optimizer = modules[0]
    others: list[bagua.Stats] = []
    for step in range(1, 8):
        train(model, optimizer, [step])
        others.append(bagua.stats(model))
    return first, others


def test_hidden_communication_is_not_exposed(pool: RankPool) -> None:
    """Two exchanges of 50 ms: one hides behind 150 ms of compute. Both are exposed in the first step.

    The best of several steps: a rank that is late exposes what would be hidden, and hides what would be exposed.
    """
    for first, others in pool.run(2, hidden):
        assert all(stats.last.comm_s >= 0.1 for stats in (*first, *others))
        assert max(stats.last.exposed_s for stats in first) >= 0.09
        best = max(others, key=lambda stats: stats.last.comm_s - stats.last.exposed_s)
        assert best.last.exposed_s <= best.last.comm_s - 0.04


def profiled() -> tuple[dict[str, int], list[dict[str, Any]]]:
    """How often each of our spans shows in a profile of three steps, and the arguments of the launches."""
    model, optimizer = distributed(Net, "bytegrad", bucket_bytes=200)
    train(model, optimizer, range(2))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as trace:
        train(model, optimizer, range(2, 5))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        trace.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    launches = [event["args"] for event in events if str(event.get("name")).startswith("bagua::launch")]
    counts = {event.key: event.count for event in trace.key_averages() if "bagua" in event.key}
    return {**counts, "buckets": bagua.stats(model).num_buckets}, launches


def test_spans_of_a_profile_add_up(pool: RankPool) -> None:
    """Names without step and bucket, of which `key_averages` makes one row; those are arguments in the trace."""
    for counts, launches in pool.run(2, profiled):
        num_buckets = counts.pop("buckets")
        assert counts["bagua::launch scatter_gather[minmax_uint8]"] == 3 * num_buckets > 3
        assert counts["bagua::wait"] >= 3
        assert set(counts) <= {
            "bagua::wait",
            *(f"bagua::{verb} scatter_gather[minmax_uint8]" for verb in ("launch", "run")),
        }
        found = {(each["step"], each["bucket"]) for each in launches}
        assert found == {(step, bucket) for step in (2, 3, 4) for bucket in range(num_buckets)}
        assert all(each["bytes"] > 0 for each in launches)


class Meeting:
    """Of an exchange with the rest of the backward pass: neither ends before the other one has begun."""

    armed = False
    running, computing = threading.Event(), threading.Event()


class Meets(AllReduce):
    """An all-reduce that lasts until the rest of the backward pass is in progress."""

    def run(self, x_N, state, groups, step) -> None:
        Meeting.running.set()
        assert not Meeting.armed or Meeting.computing.wait(90)
        super().run(x_N, state, groups, step)


class MeetingOnce(bagua.algorithms.GradientAllReduce):
    """Uses `Meets`."""

    exchange = Meets()  # pyright: ignore[reportAssignmentType]


class Computes(torch.autograd.Function):
    """Passes through; its backward lasts until an exchange is in progress."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        with record_function("computes"):
            Meeting.computing.set()
            assert not Meeting.armed or Meeting.running.wait(90)
        return grad


class TwoLayers(Overlapping):
    """The second layer's exchange runs while the first one's gradient is computed."""

    def forward(self, x):
        return self.second(Computes.apply(self.first(x)))


def traced(all_threads: bool) -> list[dict[str, Any]]:
    """The spans of an exported trace of one step: name, thread, begin and duration in us."""
    algorithm: Any = MeetingOnce()
    model, optimizer = distributed(TwoLayers, algorithm, bucket_bytes=1, num_lanes=1)
    train(model, optimizer, range(2))
    Meeting.running.clear()
    Meeting.computing.clear()
    Meeting.armed = True
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    try:
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config, acc_events=True) as trace:
            train(model, optimizer, [2])
    finally:
        Meeting.armed = False
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        trace.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def test_a_trace_of_all_threads_shows_overlap(pool: RankPool) -> None:
    """An exchange is in a row of its own, beside what the training thread computes meanwhile."""
    for spans in pool.run(2, traced, True):
        (compute,) = [span for span in spans if span["name"] == "computes"]
        runs = [span for span in spans if span["name"].startswith("bagua::run")]
        waits = [span for span in spans if span["name"] == "bagua::wait"]
        assert len(runs) == 2 and {span["tid"] for span in waits} == {compute["tid"]} != {runs[0]["tid"]}
        first = min(runs, key=lambda span: span["ts"])
        assert first["ts"] < compute["ts"] + compute["dur"] and compute["ts"] < first["ts"] + first["dur"]
    for spans in pool.run(2, traced, False):
        names = {span["name"] for span in spans}
        assert "bagua::wait" in names and not [name for name in names if name.startswith("bagua::run")]


def as_plain_data() -> dict[str, Any]:
    model, optimizer = distributed(Net, "bytegrad", guard=bagua.Guard(every=1))
    train(model, optimizer, range(3))
    stats = bagua.stats(model)
    found = json.loads(json.dumps(stats.to_dict()))
    for name in ("last", "total"):
        part = getattr(stats, name)
        assert found[name]["compression_ratio"] == part.compression_ratio
        assert found[name]["bits_per_s"] == part.bits_per_s
    return found


def test_plain_data_hold_computed_values_too(pool: RankPool) -> None:
    for found in pool.run(2, as_plain_data):
        assert found.keys() == {field.name for field in dataclasses.fields(bagua.Stats)}
        names = {name for name, value in vars(bagua.StepStats).items() if isinstance(value, property)}
        assert found["total"].keys() == names | {field.name for field in dataclasses.fields(bagua.StepStats)}
        assert found["quality"]["cosine"] > 0.9


def logs() -> tuple[list[str], tuple[str, ...]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore
    logging.getLogger("bagua").addHandler(handler)
    try:
        model, optimizer = distributed(algorithm="bytegrad", hierarchical=True)
        train(model, optimizer, range(2))
        return records, bagua.stats(model).notices
    finally:
        logging.getLogger("bagua").removeHandler(handler)


def test_an_option_that_cannot_act_is_reported_once_by_rank_0(pool: RankPool) -> None:
    first, second = pool.run(2, logs)
    assert [r for r in first[0] if "hierarchical" in r] == [f"WARNING: bytegrad: {first[1][0]}"]
    assert not second[0] and second[1] == first[1]
    assert "one node" in first[1][0]


def test_quiet_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    bagua.init_process_group()
    try:
        model, optimizer = distributed()
        model(batch(0, 0)).sum().backward()
        optimizer.step()
    finally:
        bagua.destroy_process_group()
    assert capfd.readouterr() == ("", "")
    assert not dist.is_initialized()
