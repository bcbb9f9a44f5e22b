"""NCCL between ranks that may be lost, with stand-ins for its backend and for the events of a GPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua.comm import collectives
from bagua.comm.abortable_nccl import AbortableNccl, make_nccl, why_no_nccl
from bagua.comm.groups import Group, Groups
from bagua.engine.lanes.lane import ThreadLane
from bagua.engine.lanes.selection import make_lane
from bagua.engine.lanes.stream_lane import StreamLane
from bagua.errors import CommunicationError
from tests.engine.fake_cuda import install

CUDA = torch.device("cuda", 0)
LIMIT_S, NEVER_S = 100.0, 600.0


class Backend:
    """Tells what was called, in order. `over` says when its kernels have ended."""

    def __init__(self) -> None:
        self.called: list[Any] = []
        self.over, self.enqueued = threading.Event(), threading.Event()
        self.error: RuntimeError | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.error is not None:
                raise self.error
            self.called.append(name)
            return self

        return call

    def wait(self) -> None:
        self.enqueued.set()

    def abort(self) -> None:
        self.called.append("abort")
        self.over.set()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    made = Backend()

    class Event:
        def record(self, stream: Any) -> None:
            assert stream == CUDA

        def query(self) -> bool:
            return made.over.is_set()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    return made


def group_of(backend: Backend, timeout_s: float = NEVER_S, alert: Callable[[], object] = lambda: None) -> Group:
    pg = AbortableNccl(backend, CUDA, timeout_s, alert)
    return Group(pg, 0, 2, (0, 1), "nccl", abortable=True)


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def ended(thread: threading.Thread) -> None:
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_collective_is_over_when_it_has_been_waited_for(backend: Backend) -> None:
    group = group_of(backend)
    thread, errors = in_thread(lambda: collectives.all_reduce_(group, torch.ones(3)))
    assert backend.enqueued.wait(LIMIT_S)
    assert thread.is_alive() and group.waits_since is not None
    backend.over.set()
    ended(thread)
    assert not errors and backend.called == ["allreduce"] and group.waits_since is None


def test_transfers_of_a_batch_begin_together(backend: Backend) -> None:
    backend.over.set()
    collectives.swap(group_of(backend), [(1, torch.ones(2)), (1, torch.ones(1))], [(1, torch.zeros(2))])
    assert backend.called == ["_start_coalescing", "recv", "send", "send", "_end_coalescing"]


@pytest.mark.parametrize(
    "call",
    [
        lambda group: collectives.broadcast_(group, torch.ones(3)),
        lambda group: collectives.reduce_(group, torch.ones(3)),
        lambda group: collectives.all_to_all_rows(group, torch.ones(2, 3), torch.ones(2, 3)),
        lambda group: collectives.all_gather_rows(group, torch.ones(2, 3)),
        lambda group: collectives.swap(group, [(1, torch.ones(2))], []),
    ],
)
def test_an_abort_ends_what_waits_and_refuses_the_rest(backend: Backend, call: Callable[[Group], Any]) -> None:
    """Kernels end without an error then, and whatever is in the tensors must not be used."""
    group = group_of(backend)
    thread, errors = in_thread(lambda: call(group))
    assert backend.enqueued.wait(LIMIT_S)
    group.sever()
    ended(thread)
    assert len(errors) == 1 and isinstance(errors[0], CommunicationError)
    before = list(backend.called)
    with pytest.raises(CommunicationError, match="aborted"):
        call(group)
    group.sever()
    group.leave(abort=True)
    assert backend.called == before and before.count("abort") == 1


def test_who_waits_looks_at_the_members_itself(backend: Backend) -> None:
    lost = threading.Event()

    def alert() -> None:
        if lost.is_set():
            raise CommunicationError("the members of group 3 have changed")

    group = group_of(backend, alert=alert)
    thread, errors = in_thread(lambda: collectives.all_reduce_(group, torch.ones(3)))
    assert backend.enqueued.wait(LIMIT_S)
    lost.set()
    ended(thread)
    assert "members of group 3" in str(errors[0]) and backend.called == ["allreduce", "abort"]


def test_a_peer_that_does_not_answer_is_not_waited_for_without_limit(backend: Backend) -> None:
    with pytest.raises(CommunicationError, match=r"did not answer over NCCL within 0\.2 s"):
        collectives.all_reduce_(group_of(backend, timeout_s=0.2), torch.ones(3))
    assert backend.called == ["allreduce", "abort"]


def test_an_error_of_nccl_is_raised_as_it_is_and_after_an_abort_as_a_loss(backend: Backend) -> None:
    group = group_of(backend)
    backend.error = RuntimeError("ncclInvalidUsage")
    with pytest.raises(RuntimeError, match="ncclInvalidUsage") as found:
        collectives.all_reduce_(group, torch.ones(3))
    assert not isinstance(found.value, CommunicationError)

    def fails() -> None:
        group.pg.abort()
        raise RuntimeError("NCCL communicator was aborted")

    backend.error = None
    backend.wait = fails  # type: ignore[method-assign]
    with pytest.raises(CommunicationError, match="aborted"):
        collectives.all_reduce_(group, torch.ones(3))


def test_an_abort_that_hangs_is_left_behind(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua.comm.abortable_nccl._SETTLE_S", 0.1)
    released = threading.Event()
    backend.abort = lambda: released.wait(LIMIT_S)  # type: ignore[method-assign,assignment]
    group = group_of(backend)
    thread, errors = in_thread(lambda: collectives.all_reduce_(group, torch.ones(3)))
    assert backend.enqueued.wait(LIMIT_S)
    began = time.monotonic()
    group.sever()
    ended(thread)
    assert time.monotonic() - began < LIMIT_S / 2 and isinstance(errors[0], CommunicationError)
    released.set()


def test_ranks_that_may_be_lost_have_a_lane_that_blocks(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is alone. The stream of others holds what waits for a lost rank, with no one to free it."""
    cpu = torch.device("cpu")
    lanes = [make_lane(Groups(group_of(backend), ((0, 1),)), cpu)]
    lanes.append(make_lane(Groups(Group(None, 0, 1, (0,), "nccl", abortable=True), ((0,),)), cpu))
    for lane in lanes:
        assert isinstance(lane, ThreadLane)
    ticket = lanes[0].submit(lambda: collectives.all_reduce_(lanes[0].groups.world, torch.ones(3)), "bucket 0")
    assert backend.enqueued.wait(LIMIT_S)
    lanes[0].sever()
    ticket.wait()
    assert isinstance(ticket.error, CommunicationError)
    for lane in lanes:
        lane.close()
    install(monkeypatch)
    assert isinstance(make_lane(Groups(Group(None, 0, 2, (0, 1), "nccl"), ((0, 1),)), CUDA), StreamLane)


def test_who_aborts_second_waits_for_the_first(backend: Backend) -> None:
    """Else it would use tensors to which kernels may still write."""
    released, began = threading.Event(), threading.Event()

    def abort() -> None:
        began.set()
        assert released.wait(LIMIT_S)

    backend.abort = abort  # type: ignore[method-assign]
    pg = group_of(backend).pg
    pg.abort(wait=False)
    assert began.wait(LIMIT_S)
    thread, errors = in_thread(pg.abort)
    thread.join(0.1)
    assert thread.is_alive()
    released.set()
    ended(thread)
    assert not errors


def test_a_batch_that_breaks_off_is_ended(backend: Backend) -> None:
    """NCCL would add the next operations to it."""
    backend.over.set()

    def fails(*_: Any) -> None:
        raise RuntimeError("ncclInvalidArgument")

    backend.send = fails
    with pytest.raises(RuntimeError, match="ncclInvalidArgument"):
        collectives.swap(group_of(backend), [(1, torch.ones(2))], [(1, torch.zeros(2))])
    assert backend.called == ["_start_coalescing", "recv", "_end_coalescing"]


def test_what_fails_since_the_members_have_changed_is_a_loss(backend: Backend) -> None:
    def alert() -> None:
        raise CommunicationError("the members of group 3 have changed")

    backend.error = RuntimeError("an illegal memory access")
    with pytest.raises(CommunicationError, match="members of group 3"):
        collectives.all_reduce_(group_of(backend, alert=alert), torch.ones(3))


def test_the_watchdog_of_these_groups_alone_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    class Nccl:
        def __init__(self, *_: Any) -> None:
            seen.extend(os.environ.get(name) for name in names)

        class Options:
            _timeout: Any = None

    names = ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv(names[0], "1")
    monkeypatch.delenv(names[1], raising=False)
    make_nccl(None, 0, 2, timedelta(seconds=60))
    assert seen == ["0"] * 3
    assert os.environ[names[0]] == "1" and names[1] not in os.environ


def test_tensors_of_a_cpu_are_refused() -> None:
    assert "CUDA tensors" in str(why_no_nccl(torch.device("cpu")))
