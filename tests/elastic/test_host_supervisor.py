"""How a host ends whose ranks end well, fail, or are lost shortly before the others end. The ranks are no processes."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from bagua.distributed.failures import FirstFailure
from bagua.distributed.founding import Job
from bagua.distributed.host_supervisor import HostSupervisor
from bagua.distributed.job_store import JobNote, ServedStore
from bagua.membership import Agent, Epoch, Member, Options, Record, Verdict
from bagua.membership.seat import payload_of
from bagua.membership.transport import Transport
from tests.elastic.hosts import TOKEN, wait_for

LOST = -signal.SIGKILL


class Rank:
    """Takes the place of a `RankProcess`: it ends when the test says so."""

    started: list[Rank]

    def __init__(self, start: object, env: object, directory: Path, local_rank: int) -> None:
        self.code: int | None = None
        self.local, self.pid = local_rank, 1000 + len(self.started)
        self.started.append(self)

    def poll(self) -> int | None:
        return self.code

    def send(self, number: int) -> None:
        self.code = -number if self.code is None else self.code

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def stopped_s(self, now: float) -> float:
        return 0.0

    def failure(self) -> ProcessFailure:
        assert self.code
        return ProcessFailure(self.local, self.pid, self.code, "<N/A>")


def _no_process(env: Mapping[str, str]) -> NoReturn:
    raise AssertionError("a rank was started")


class Host:
    """One host of three ranks, each of which may be started again twice."""

    def __init__(self, directory: Path) -> None:
        served = ServedStore([("127.0.0.1", 0)])
        listener = socket.create_server(("127.0.0.1", 0))
        me = Member("h", 0, f"127.0.0.1:{listener.getsockname()[1]}", payload_of(served.address, 3), seats=(0, 1, 2))
        epoch = Epoch.first([me])
        agent = Agent(
            Record("job", "h", 0, me.address), Options(), time.monotonic(),
            epoch=epoch, payload=me.payload, seats=me.seats,
        )  # fmt: skip
        self.transport = Transport(agent, listener, TOKEN)
        self.ranks: list[Rank] = []
        Rank.started = self.ranks
        self.lines: list[str] = []
        job = Job(JobNote("none", "job", epoch, 1, (me.address,), TOKEN.hex(), ""), TOKEN, founder=True)
        starts = [_no_process] * 3
        self._supervisor = HostSupervisor(
            job, served, self.transport, directory, starts, "script", 2, 600.0, self.lines.append
        )
        self._failures: dict[int, ProcessFailure] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_for(lambda: len(self.ranks) == 3, "ranks")

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except FirstFailure as error:
            self._failures = error.failures
        except BaseException as error:
            self._error = error

    def train(self, *locals_: int, finish: bool = True) -> None:
        """These make a step together."""
        for verb in ("start_step", "finish_step")[: 1 + finish]:
            for local in locals_:
                wait_for(partial(self.granted, verb, local), verb)

    def granted(self, verb: str, local: int) -> bool:
        """Whether the agent lets this rank begin or finish its next step."""

        def ask(agent: Agent, _: float) -> Verdict:
            step, _in_step = agent.seats.standing(local)
            assert agent.epoch is not None
            return getattr(agent, verb)(agent.epoch.group, step, local)

        return self.transport.call(ask) is Verdict.GRANTED

    def epoch(self) -> Epoch:
        epoch = self.transport.call(lambda agent, _: agent.epoch)
        assert epoch is not None
        return epoch

    def end(self, rank: int, code: int) -> None:
        """And wait until the supervisor has seen it."""
        self.ranks[rank].code = code
        wait_for(lambda: not self._thread.is_alive() or self._seen(self.ranks[rank]), "end of a rank")

    def _seen(self, rank: Rank) -> bool:
        running = [slot.process for slot in self._supervisor._slots]
        return not any(each is rank for each in running)

    def result(self, timeout_s: float = 20.0) -> list[int]:
        """The exit codes that the host reports, soon."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the host has not ended: {self.lines}"
        assert self._error is None
        assert all(rank.code is not None for rank in self.ranks), "a rank is left"
        return sorted(each.exitcode for each in self._failures.values())

    def close(self) -> None:
        for _ in range(3):
            for rank in self.ranks.copy():
                rank.kill()
            self._thread.join(1.0)
        self.transport.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr("bagua.distributed.rank_slot.RankProcess", Rank)
    monkeypatch.setattr(HostSupervisor, "_signals", nullcontext)  # it runs in a thread here
    tmp_path.chmod(0o700)
    made = Host(tmp_path)
    yield made
    made.close()


def lose_one(host: Host, code: int = LOST) -> None:
    """The first rank ends in its second step. What is started in its place has no weights."""
    host.train(0, 1, 2)
    host.train(0, 1, 2, finish=False)
    host.end(0, code)
    wait_for(lambda: len(host.ranks) == 4, "newcomer")


def test_a_rank_that_was_lost_before_the_others_trained_to_the_end(host: Host) -> None:
    lose_one(host)
    host.train(1, 2)
    host.end(1, 0)
    assert host.ranks[3].code is None, "a rank still trains, and can give it the weights"
    host.end(2, 0)
    assert host.result() == []
    assert "no rank is left that has the weights: the job ends; others have trained to the end" in host.lines
    assert host.ranks[3].code == LOST


def test_a_rank_that_makes_no_steps_together_with_the_others(host: Host) -> None:
    """With `async` no step ends together: the agent knows none that the others have made since."""
    host.train(0, 1, 2, finish=False)
    host.end(0, LOST)
    for rank in (1, 2):
        host.end(rank, 0)
    assert host.result() == []


def test_a_newcomer_that_fails_as_the_others_end(host: Host) -> None:
    lose_one(host)
    host.train(1, 2)
    host.end(1, 0)
    host.end(3, 1)  # it could not reach the one that has ended
    host.end(2, 0)
    assert host.result() == []


def test_the_newcomer_takes_the_weights_over_and_trains_to_the_end(host: Host) -> None:
    lose_one(host)
    host.transport.call(lambda agent, now: agent.rank_wants_weights(now, 3))

    def admitted() -> bool:
        for local in (1, 2):  # they rest before the next step
            host.granted("start_step", local)
        return host.epoch().members[0].seats == (1, 2, 3)

    wait_for(admitted, "epoch with the newcomer")
    number = host.epoch().number
    verdict = host.transport.call(lambda agent, _: agent.weights_fetched(number, 1, 3))
    assert verdict is Verdict.GRANTED
    for rank in (1, 2):
        host.end(rank, 0)
    time.sleep(0.3)
    assert host.ranks[3].code is None, "it has the weights, and may be saving them"
    host.end(3, 0)
    assert host.result() == []


FAILURES: dict[str, tuple[Callable[[Host], object], list[int]]] = {
    "of its own in training": (lambda host: lose_one(host, 3), [3]),
    "killed after the last step": (lambda host: (host.train(0, 1, 2), host.end(0, LOST)), [LOST]),
    "of its own after the last step": (lambda host: (host.train(0, 1, 2), host.end(0, 3)), [3]),
    "the last that trains": (lambda host: (host.train(0, 1, 2, finish=False), host.end(1, 0), host.end(2, 0),
                                           host.end(0, LOST)), [LOST]),
    "a lost one is forgiven, and not the one that fails after it": (lambda host: (lose_one(host), host.end(1, 0),
                                                                                 host.end(2, 5)), [5]),
}  # fmt: skip


@pytest.mark.parametrize(("fails", "codes"), FAILURES.values(), ids=FAILURES)
def test_failures_that_count(host: Host, fails: Callable[[Host], object], codes: list[int]) -> None:
    """A rank that is lost after its last step may have been saving the model, and nobody does that in its place."""
    fails(host)
    for rank in (1, 2):
        if host.ranks[rank].code is None:
            host.end(rank, 0)
    assert host.result() == codes


def test_all_ranks_are_lost(host: Host) -> None:
    lose_one(host)
    for rank in (1, 2):
        host.end(rank, LOST)
    assert set(host.result()) == {LOST}
    assert "no rank is left that has the weights: the job ends" in host.lines
