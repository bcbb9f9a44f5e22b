"""When a report writes, on which ranks, and what an error in a sink does."""

from __future__ import annotations

import dataclasses
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import bagua
from bagua.comm.team import Team
from bagua.engine import MembershipChange
from bagua.engine.hooks import attachments
from tests.metrics.training import Loop, Recorder
from tests.rank_threads import run_teams


@pytest.fixture
def one_rank() -> Iterator[None]:
    bagua.init_process_group()
    yield
    bagua.destroy_process_group()


def listeners(loop: Loop) -> tuple[Any, ...]:
    return attachments[loop.module].engine.tracker.listeners.active


def test_nothing_listens_unless_asked(one_rank: None) -> None:
    loop = Loop()
    assert listeners(loop) == ()
    report = bagua.metrics.report(loop.module, Recorder())
    assert listeners(loop) == (report,)
    report.close()
    assert listeners(loop) == ()


def test_every_few_steps_and_at_the_end(one_rank: None) -> None:
    loop, recorder, functions = Loop(), Recorder(), []
    loop.train(1)
    report = bagua.metrics.report(loop.module, [recorder, functions.append], every=3)
    loop.train(6)
    assert recorder.moments == ["open 0", (3, 1), (6, 3)]
    report.flush()
    assert recorder.moments[3:] == [(7, 6)]
    assert functions[-1] == bagua.stats(loop.module)
    report.flush()
    report.flush()
    report.close()
    report.close()
    loop.train(3)
    assert recorder.moments[3:] == [(7, 6), "close"]
    assert recorder.stats == functions


def test_as_a_context_manager_it_closes_after_an_error_of_the_loop(one_rank: None) -> None:
    loop, recorder = Loop(), Recorder()
    with pytest.raises(KeyError), bagua.metrics.report(loop.module, recorder, every=10):
        loop.train(2)
        raise KeyError
    assert recorder.moments == ["open 0", (2, 0), "close"]


def test_detach_closes(one_rank: None) -> None:
    loop, recorder = Loop(), Recorder()
    report = bagua.metrics.report(loop.module, recorder, every=10)
    loop.train(2)
    bagua.detach(loop.module)
    report.close()
    assert recorder.moments == ["open 0", (2, 0), "close"]


def test_a_switch_counts_on(one_rank: None) -> None:
    loop, recorder = Loop(), Recorder()
    report = bagua.metrics.report(loop.module, recorder, every=2)
    loop.train(3)
    loop.distribute("bytegrad")
    loop.train(3)
    assert bagua.stats(loop.module).steps == 3
    report.close()
    assert recorder.moments == ["open 0", (2, 0), (3, 2), (5, 3), (6, 5), "close"]
    assert [each.total.launches for each in recorder.stats] == [2, 3, 5, 6]
    assert recorder.stats[-1].algorithm.startswith("ByteGrad")


def test_a_refused_switch_goes_on(one_rank: None) -> None:
    loop, recorder = Loop(), Recorder()
    report = bagua.metrics.report(loop.module, recorder, every=2)
    with pytest.raises(ValueError):
        loop.distribute("no such algorithm")
    loop.train(2)
    report.close()
    assert recorder.moments == ["open 0", (2, 0), "close"]


def test_a_report_keeps_no_module_alive(one_rank: None) -> None:
    loop = Loop()
    report = bagua.metrics.report(loop.module, Recorder(), every=1)
    loop.train(1)
    ref = weakref.ref(loop.module)
    del loop
    gc.collect()
    assert ref() is None
    report.close()


def on_ranks(team: Team, ranks: Any) -> tuple[list[Any], bool | None, list[bagua.Stats]]:
    loop, recorder = Loop(team, "bytegrad"), Recorder()
    with bagua.metrics.report(loop.module, recorder, every=1, ranks=ranks):
        loop.train(2)
    bagua.detach(loop.module)
    return recorder.moments, recorder.alone, recorder.stats


@pytest.mark.parametrize(("ranks", "reporting"), [(0, {0}), (1, {1}), ([1, 0], {0, 1}), ("all", {0, 1})])
def test_each_rank_reports_its_own(ranks: Any, reporting: set[int]) -> None:
    for rank, (moments, alone, stats) in enumerate(run_teams(2, on_ranks, ranks)):
        assert moments == ([f"open {rank}", (1, 0), (2, 1), "close"] if rank in reporting else [])
        assert alone == (len(reporting) == 1 if rank in reporting else None)
        assert all(each.rank == rank and each.size == 2 and each.total.bytes_sent > 0 for each in stats)


def test_a_rank_that_moves_up_reports(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is lost: rank 1, which is rank 0 then, goes on where its own last interval began."""
    loop, recorder, rank = Loop(), Recorder(), 1
    change = MembershipChange(2, 2, ("h0",), (), "h0 is lost", skipped=False, stalled_s=0.5)

    def stats(module: torch.nn.Module) -> bagua.Stats:
        return dataclasses.replace(bagua.stats(module), rank=rank, size=2, membership=(change,) * (1 - rank))

    monkeypatch.setattr("bagua.metrics.reporting.stats", stats)
    report = bagua.metrics.report(loop.module, recorder, every=1)
    loop.train(2)
    assert recorder.moments == []
    rank = 0
    loop.train(1)
    report.close()
    assert recorder.moments == ["open 0", (3, 2), "close"]
    values = bagua.metrics.scalars(recorder.stats[-1])
    assert values["membership_changes_total"] == 1 and values["membership_stalled_seconds_total"] == 0.5


def records(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "metrics" in record.getMessage()]


def test_a_sink_that_raises_is_logged_once(one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    loop, broken, other, good = Loop(), Recorder(["write", "close"]), Recorder(["write"]), Recorder()
    with caplog.at_level(logging.WARNING, "bagua"):
        with bagua.metrics.report(loop.module, [broken, other, good], every=1):
            loop.train(3)
    assert good.moments == ["open 0", (1, 0), (2, 1), (3, 2), "close"] == broken.moments
    found = records(caplog)
    assert len(found) == 3 and sum("OSError: write failed; training goes on" in each for each in found) == 2
    assert "rank 0, metrics, sink 0, Recorder: " in found[0] and "closing" in found[2]
    assert all(record.exc_info for record in caplog.records if "write failed" in record.getMessage())


def one_sink_raises(team: Team) -> list[torch.Tensor]:
    loop = Loop(team)
    bagua.metrics.report(loop.module, Recorder(["write"]), every=1)
    loop.train(3)
    weights = [param.detach().clone() for param in loop.module.parameters()]
    bagua.detach(loop.module)
    return weights


def test_a_sink_that_raises_on_one_rank_holds_up_no_other() -> None:
    first, second = run_teams(2, one_sink_raises)
    assert all(map(torch.equal, first, second)) and first[0].abs().sum() > 0


def test_an_interrupt_in_a_sink_ends_training(one_rank: None) -> None:
    def interrupted(_: bagua.Stats) -> None:
        raise KeyboardInterrupt

    loop = Loop()
    bagua.metrics.report(loop.module, interrupted, every=1)
    with pytest.raises(KeyboardInterrupt):
        loop.train(1)


def test_a_sink_that_cannot_be_opened_is_an_error_at_once(one_rank: None) -> None:
    loop, first, second = Loop(), Recorder(), Recorder(["open"])
    with pytest.raises(OSError, match="open failed"):
        bagua.metrics.report(loop.module, [first, second])
    assert first.moments == ["open 0", "close"]
    assert listeners(loop) == ()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every: expected a positive number of steps, got 0"),
        ({"every": True}, ValueError, "every: expected a positive number of steps, got True"),
        ({"every": 2.5}, ValueError, "every: expected a positive number of steps, got 2.5"),
        ({"ranks": -1}, ValueError, 'ranks: expected a rank, several different ranks or "all", got -1'),
        ({"ranks": "first"}, ValueError, "got 'first'"),
        ({"ranks": [0, 0]}, ValueError, "several different ranks"),
        ({"ranks": [1, 2]}, ValueError, r"ranks: \[1, 2\] names none of the 1 ranks"),
        ({"ranks": []}, ValueError, r"ranks: \[\] names none"),
        ({"to": []}, ValueError, "to: expected at least one sink"),
        ({"to": [print, None]}, TypeError, r"to\[1\]: a NoneType is no sink; pass a bagua.metrics.Sink"),
    ],
    ids=str,
)
def test_bad_input(one_rank: None, options: dict[str, Any], error: type[Exception], message: str) -> None:
    loop = Loop()
    with pytest.raises(error, match=message):
        bagua.metrics.report(loop.module, **{"to": print, **options})
    assert listeners(loop) == ()


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(1, 1), lambda: None, lambda: 3])
def test_a_module_that_is_not_distributed(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"is not distributed; call bagua.distribute\(\) first"):
        bagua.metrics.report(make(), print)
