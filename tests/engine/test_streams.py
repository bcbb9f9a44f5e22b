"""Which stream waits for which, seen without a GPU: lanes on streams, and gradients of several streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua.comm.groups import Group, Groups
from bagua.engine.lanes.lane import ThreadLane
from bagua.engine.lanes.stream_lane import StreamLane
from bagua.engine.reducer.gradient_streams import GradientStreams
from tests.engine.fake_cuda import FakeCuda, FakeStream, install

CUDA = torch.device("cuda", 0)


class Backend:
    """Stands for an NCCL backend and remembers how it ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def abort(self) -> None:
        self.ended.append("abort")

    def shutdown(self) -> None:
        self.ended.append("shutdown")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def groups(backend: str = "nccl") -> tuple[Groups, Backend]:
    pg = Backend()
    return Groups(Group(pg, 0, 2, (0, 1), backend), ((0, 1),)), pg


def happens(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not what() and time.monotonic() < deadline:
        time.sleep(0.001)
    return what()


def test_an_exchange_comes_after_the_gradient_and_before_the_optimizer(cuda: FakeCuda) -> None:
    lane = StreamLane(groups()[0], CUDA)
    cuda.default.do("gradient")
    seen: list[set[str]] = []

    def exchange() -> None:
        cuda.current().do("exchange")
        seen.append(set(cuda.current().known))

    ticket = lane.submit(exchange, "bucket 0")
    assert seen == [{"gradient", "exchange"}] and "exchange" not in cuda.default.known
    lane.wait(ticket)
    assert "exchange" in cuda.default.known
    assert ticket.done and ticket.error is None and ticket.device_seconds() == 1.5


def test_a_tensor_of_the_cpu_is_left_alone(cuda: FakeCuda) -> None:
    StreamLane(groups()[0], CUDA).adopt(torch.zeros(3))  # torch refuses to record it on a stream


def test_an_error_is_kept_for_who_waits_and_nothing_runs_after_it(cuda: FakeCuda) -> None:
    lane, runs = StreamLane(groups()[0], CUDA), []

    def fails() -> None:
        raise ValueError("no")

    first, second = lane.submit(fails, "bucket 0"), lane.submit(lambda: runs.append(1), "bucket 1")
    lane.wait(first)
    assert isinstance(first.error, ValueError) and second.error is first.error and not runs
    assert first.done and first.device_seconds() is None


def test_a_communicator_is_ended_when_its_stream_is_over(cuda: FakeCuda) -> None:
    for end, ended, synchronized in (
        (lambda lane: lane.close(), ["shutdown"], 1),
        (lambda lane: lane.stop(1.0), ["shutdown"], 0),
        (lambda lane: lane.abandon(), ["abort"], 0),
    ):
        mine, pg = groups()
        lane: Any = StreamLane(mine, CUDA)
        end(lane)
        end(lane)  # a second time nothing happens
        assert (pg.ended, mine.world.pg) == (ended, None)
        assert (lane._stream.synchronized > 0) == (synchronized > 0)


def test_a_stream_that_hangs_is_aborted_at_exit(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, pg = groups()
    lane = StreamLane(mine, CUDA)
    monkeypatch.setattr(FakeStream, "query", lambda stream: False)
    lane.stop(0.0)
    assert pg.ended == ["abort"]


def test_a_lane_that_is_dropped_waits_for_its_stream_and_for_the_peers(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, pg = groups()
    over = threading.Event()
    monkeypatch.setattr(FakeStream, "query", lambda stream: over.is_set())
    lane = StreamLane(mine, CUDA)
    del lane  # as with a model at the end of a script's `main`
    time.sleep(0.05)
    assert pg.ended == []
    over.set()
    assert happens(lambda: pg.ended == ["shutdown"])


def test_a_lane_that_is_dropped_after_its_gpu_has_failed_is_aborted(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(stream: FakeStream) -> bool:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(FakeStream, "query", fails)
    mine, pg = groups()
    StreamLane(mine, CUDA)
    assert happens(lambda: pg.ended == ["abort"])


def test_a_lane_that_is_dropped_while_a_peer_is_gone_is_aborted_in_the_end(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeStream, "query", lambda stream: False)
    monkeypatch.setattr("bagua.engine.lanes.stream_lane._DRAIN_S", 0.01)
    mine, pg = groups()
    StreamLane(mine, CUDA)
    assert happens(lambda: pg.ended == ["abort"])


def test_a_thread_on_a_gpu_has_a_stream_of_its_own(cuda: FakeCuda) -> None:
    lane = ThreadLane(groups("gloo")[0], device=CUDA)
    cuda.default.do("gradient")
    seen: list[Any] = []

    def exchange() -> None:
        seen.extend([cuda.current(), set(cuda.current().known)])

    lane.wait(lane.submit(exchange, "bucket 0"))
    stream, known = seen
    assert stream is not cuda.default and known == {"gradient"} and stream.synchronized == 1
    lane.close()


def test_a_bucket_waits_for_gradients_of_other_streams(cuda: FakeCuda) -> None:
    streams, other = GradientStreams(CUDA), FakeStream()
    streams.clear()
    with cuda.on(other):
        other.do("first gradient")
        streams.note()
    cuda.default.do("second gradient")
    streams.note()

    class Gradient:
        recorded: Any = None

        def record_stream(self, stream: Any) -> None:
            self.recorded = stream

    gradient: Any = Gradient()
    assert streams.join()
    streams.keep([gradient])
    assert cuda.default.known == {"first gradient", "second gradient"} and gradient.recorded is cuda.default
    streams.clear()
    streams.note()
    assert not streams.join()  # one stream, the current one: nothing to do
