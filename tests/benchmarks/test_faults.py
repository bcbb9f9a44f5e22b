"""The benchmark of faults: what it makes of records that are written here; with `-m slow` one fault for real."""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bagua
from bagua.algorithms import LostStep
from benchmarks.faults import __main__ as program
from benchmarks.faults import chaos, report, rounds, systems
from benchmarks.faults.analysis import Fault, cost_of, differing, intervals, participation, splits
from benchmarks.faults.job import Stuck
from benchmarks.faults.journal import Journal
from benchmarks.faults.records import Journals, Process, Step, read
from benchmarks.faults.task import longest_interval
from benchmarks.faults.tour import local_steps, transfer_s
from benchmarks.faults.train import went_on
from tests.benchmarks.quick_run import run_quickly
from tests.fork_server import ForkServer


def process(host: int, first: int, last: int, begin: float, *, rank: int = 0, size: int = 3, **other: Any) -> Process:
    """Made steps `first` to `last`, one each 0.1 s, with equal weights on all ranks."""
    steps = [
        Step(step, begin + 0.1 * at, begin + 0.1 * at + 0.09, rank, size, True, 1000 + step)
        for at, step in enumerate(range(first, last + 1))
    ]
    return Process(host, 10 + host, **{"started": begin - 3, "ready": begin - 1, "steps": steps, **other})


def change(begin: float, stalled_s: float, lost: list[str], joined: list[str]) -> dict[str, Any]:
    return {"begin": begin, "stalled_s": stalled_s, "lost": lost, "joined": joined, "epoch": 2}


def lost_and_back() -> list[Process]:
    """Three hosts train; host 2 is killed at 12.05 in step 20, and is back from 20.0 on."""
    found = []
    for host in (0, 1):
        one = process(host, 0, 19, 10.0, rank=host)
        one.steps.append(Step(20, 12.0, 12.2, host, 3, False, 1019))
        one.steps += process(host, 20, 94, 12.5, rank=host, size=2).steps
        one.steps += process(host, 95, 104, 20.1 + 0.02 * host, rank=host).steps
        one.changes = [change(12.5, 0.3 + 0.05 * host, ["c"], []), change(20.1, 0.15, [], ["c"])]
        found.append(one)
    killed = process(2, 0, 19, 10.0, rank=2)
    back = process(2, 95, 104, 20.1, rank=2, started=14.0, ready=19.0)
    return [*found, killed, back]


def test_the_cost_of_a_killed_rank() -> None:
    fault = Fault("kill-rank", [2], 12.05, until=12.05, over=22.0)
    cost = cost_of(fault, lost_and_back(), [0, 1], 3)
    assert cost.detected_s == pytest.approx(0.1) and cost.resumed_s == pytest.approx(0.35)
    assert cost.gap_s == pytest.approx(0.45) and cost.step_s == pytest.approx(0.1)
    assert (cost.lost_steps, cost.unequal, cost.restarted) == (1, 0, [])
    assert cost.compared == 85 and cost.back_s == pytest.approx(8.05) and cost.start_s == pytest.approx(6.95)
    assert cost.arrival_steps == pytest.approx(1.5) and cost.arrival_lost_steps == pytest.approx(1.2)


def test_dropped_and_repeated_steps_are_counted() -> None:
    fault = Fault("kill-host", [2], 12.05, until=15.0, over=22.0)
    assert cost_of(fault, lost_and_back(), [0, 1], 3).lost_steps == 1
    again = [process(0, 0, 19, 10.0), process(0, 10, 30, 14.0, started=12.5)]  # restarted from a checkpoint of step 10
    cost = cost_of(fault, again, [0], 3)
    assert cost.lost_steps == 10 and cost.restarted == [0] and cost.gap_s == pytest.approx(1.95)
    assert cost.detected_s is None  # it does not say when it noticed


def test_other_weights_are_found() -> None:
    found = lost_and_back()
    found[1].steps[-1] = Step(104, 21.0, 21.1, 1, 3, True, 5)
    assert differing(s for each in found for s in each.steps) == (105, 1)
    assert cost_of(Fault("kill-rank", [2], 12.05, over=22.0), found, [0, 1], 3).unequal == 1


def test_ranks_that_are_cut_off_and_train_are_found() -> None:
    cut = Fault("partition-minority-10", [2], 12.05, until=19.0, over=22.0)
    assert cost_of(cut, lost_and_back(), [0, 1], 3).trained_apart == 0
    alone = [*lost_and_back()[:2], process(2, 0, 40, 10.0, rank=2)]
    assert cost_of(cut, alone, [0, 1], 3).trained_apart == 19  # 20 to 40, but for two in flight


def test_steps_that_a_host_makes_before_it_notices_that_it_is_cut_off() -> None:
    settings = systems.Settings(detect_s=2.0, step_ms=100.0)
    steps = [local_steps(replace(settings, algorithm=name)) for name in ("bytegrad", "local_sgd", "async")]
    assert steps == [0, 7, 22]  # none without the others, an interval, and those of `detect_s`
    # On a ring of eight, those in the middle of a half wait for ranks that wait.
    rings = [replace(settings, algorithm="low_precision_decentralized", hosts=hosts) for hosts in (4, 8)]
    assert list(map(local_steps, rings)) == [1, 2]


def test_longest_intervals() -> None:
    names = ("bytegrad", "diloco", "local_sgd", "zero_one_adam")
    assert dict(zip(names, map(longest_interval, names), strict=True)) == {
        "bytegrad": 1,
        "diloco": 16,  # as the benchmark configures it
        "local_sgd": 8,  # likewise
        "zero_one_adam": 4,
    }


def test_two_models_are_found() -> None:
    together = lost_and_back()
    assert splits(together) == 0
    last = [process(0, 0, 20, 0.0, rank=0), process(1, 20, 30, 2.0, rank=0)]  # the lost one had applied its last step
    assert splits(last) == 0
    apart = [process(0, 0, 30, 0.0, rank=0), process(1, 20, 30, 2.0, rank=0)]
    assert splits(apart) == 10 == splits(apart, LostStep.REPEAT)
    assert splits(apart, LostStep.REPEAT, interval=8) == 3
    behind = [process(0, 0, 27, 0.0, rank=0), process(1, 20, 30, 2.0, rank=0)]  # renumbered within an interval
    assert splits(behind, LostStep.REPEAT, interval=8) == 0 < splits(behind, LostStep.REPEAT)
    assert splits(apart, LostStep.FREE) == 0  # ranks count their own steps, and may be numbered anew


def test_training_goes_on_with_a_step_or_within_one() -> None:
    """Where an exchange is repeated within a step, the change comes after the step's begin."""
    now, wall = time.monotonic(), time.time()
    assert went_on(SimpleNamespace(time=wall - 5), now - 1) == now - 1
    assert went_on(SimpleNamespace(time=wall - 0.5), now - 1) == pytest.approx(now - 0.5, abs=0.2)


def test_participation_counts_ranks_that_could_train() -> None:
    found = lost_and_back()
    assert participation(found, 10.0, 11.9) == 1.0
    assert participation(found, 12.5, 18.9) == 1.0  # the third is still starting
    slow = [process(0, 0, 9, 10.0, size=1), process(1, 0, 0, 30.0, ready=10.0)]
    assert participation(slow, 10.0, 12.0) == pytest.approx(0.5)


def test_states_for_the_timeline() -> None:
    found = lost_and_back()
    assert [state for state, _, _ in intervals(found, 0, [[0.0, 1e9]], 0.1)] == [
        "arriving",
        "training",
        "stalled",
        "training",
    ]
    states = intervals(found, 2, [[0.0, 12.05], [14.0, 1e9]], 0.1)
    assert [state for state, _, _ in states] == ["arriving", "training", "arriving", "training"]
    assert states[2][1:] == [14.0, pytest.approx(20.1)]


def test_time_without_training_and_growth() -> None:
    found = lost_and_back()
    assert chaos.lost_s(found, 10.0, 19.5, 0.1, [12.05]) == pytest.approx(0.5)  # from step 19 to step 20
    for each in found:
        each.changes = []
    assert chaos.lost_s(found, 10.0, 19.5, 0.1, [15.0]) == 0.0  # no pause was there then
    held = {"threads": 5, "descriptors": 10, "sockets": 3, "memory_kb": 1000}
    found[0].resources = [
        {"resources": held, "launcher": held, "at": 11.0},
        *[{"resources": {**held, "sockets": 13}, "launcher": held, "at": 21.0 + 2 * look} for look in range(10)],
    ]
    # A launcher that outlives its rank is looked at until its own end.
    later = {"resources": held, "launcher": {**held, "threads": 9}, "at": 21.0, "launcher_pid": 7, "names": ["a"]}
    found[2].resources = [{**later, "launcher": held, "at": 11.0, "names": []}]
    found[3].resources = [later] * 10
    assert chaos.growth(found, 12.0)["launcher_threads"] == 4
    found[3].resources = [later] * 9  # killed while it may have sent weights all the time
    assert chaos.growth(found, 12.0)["launcher_threads"] == 0
    found[2].resources.append({**later, "resources": {**held, "threads": 8}})
    assert chaos.new_threads(found, 12.0) == {"a": 1, "others": 2}
    found[2].resources = found[3].resources = []
    looks = [{"store": "a", "members": 4, "epoch": 2 + at // 4 * 2, "keys": 10 + 20 * (at // 4 * 2)} for at in range(8)]
    found[0].keys = [looks[0], looks[-1]]
    assert "keys_per_change" not in chaos.growth(found, 12.0)  # two looks say nothing
    found[0].keys = [{**look, "members": 4 + look["epoch"]} for look in looks]
    assert "keys_per_change" not in chaos.growth(found, 12.0)  # more members have more keys
    found[0].keys = looks
    grown = chaos.growth(found, 12.0)
    assert grown["sockets"] == 10 and grown["launcher_sockets"] == 0 and grown["keys_per_change"] == 20
    assert report.leaks(grown) == ["sockets +10", "keys_per_change +20"]
    serves = {"resources": {**held, "threads": 11}, "launcher": held, "names": ["bagua-weights", "bagua-store"] * 3}
    found[0].resources[1:] = [{**serves, "at": 21.0 + 2 * look} for look in range(10)]
    grown = chaos.growth(found, 12.0)
    assert (grown["threads"], grown["serving"]) == (0, 3)  # three hosts that arrive, and no leak
    assert report.leaks({"serving": 7}, 8) == [] and report.leaks({"serving": 8}, 8) == ["serving +8"]
    assert report.leaks({"serving": 2, "descriptors": 4}, 8) == []  # two groups of gloo in which weights are sent
    assert report.leaks({"serving": 2, "descriptors": 8}, 8) == ["descriptors +8"]


def test_journals_are_read_while_they_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_LAB_HOST", "3")
    written = Journal(tmp_path)
    journals = Journals(tmp_path)
    assert [each.host for each in journals.update()] == [3]
    written.ready()
    written.joined(7)
    written.step(7, 1.0, rank=1, size=2, applied=True, digest=9)
    written.close()
    (path,) = tmp_path.glob("*.jsonl")
    with path.open("a") as file:
        file.write('{"step": 8, "beg')  # it is killed here
    (found,) = journals.update()
    assert found.joined is not None and [each.step for each in found.steps] == [7]
    assert found.resources[0]["resources"]["threads"] >= 1 and found.resources[0]["launcher"]
    assert len(read(tmp_path)[0].steps) == 1


def test_the_middle_of_a_transfer_is_timed() -> None:
    received = [(0.0, 0), (1.0, 99), (1.5, 100), (2.0, 500), (2.5, 900), (3.0, 1100)]
    assert transfer_s(received, 1000) == 1.0
    assert transfer_s(received, 2000) is None and transfer_s([], 10) is None


def row(**other: Any) -> dict[str, Any]:
    facts = {"system": "bagua", "algorithm": "bytegrad", "hosts": 4, "fault": "kill-rank", "problems": []}
    facts |= {"detected_s": 0.1, "resumed_s": 0.2, "gap_s": 0.3, "lost_steps": 1, "compared": 9, "unequal": 0}
    facts |= {"restarted": [], "trained_apart": None, "back_s": 9.0, "start_s": 8.0, "arrival_steps": 1.0}
    return {**facts, "state_bytes": 1000, "bandwidth": "1gbit", "equal_expected": True, **other}


def test_targets() -> None:
    assert report.fault_misses(row()) == []
    for missed in (
        {"resumed_s": 1.5},
        {"resumed_s": None},
        {"lost_steps": 2},
        {"back_s": None},
        {"arrival_steps": 3.0},
    ):
        assert len(report.fault_misses(row(**missed))) == 1, missed
    assert report.fault_misses(row(back_s=11.0, state_bytes=10**9)) == []  # 11.4 s for a gigabyte
    assert len(report.fault_misses(row(back_s=11.0))) == 1
    large = {"state_bytes": 20_000_000, "bandwidth": "500mbit"}
    assert report.fault_misses(row(**large, transfer_s=0.36)) == []
    assert report.fault_misses(row(**large, transfer_s=0.5)) == ["state at 51 % of the link"]
    assert report.fault_misses(row(trained_apart=5)) == ["5 steps made by hosts that were cut off"]
    assert report.fault_misses(row(trained_apart=5, local_steps=15)) == []
    assert report.fault_misses(row(system="torchft", resumed_s=None)) == []
    for fault in ("partition-minority-60", "stop-rank"):
        assert len(report.fault_misses(row(fault=fault, resumed_s=1.5))) == 1, fault
    assert len(report.fault_misses(row(fault="partition-halves-10", back_s=None))) == 1
    unharmed = {"resumed_s": None, "back_s": None, "fault": "slow", "steps": 20}
    assert report.fault_misses(row(**unharmed, named=2)) == []
    assert report.fault_misses(row(**unharmed, named=0)) == ["the slow host was not named"]
    assert report.fault_misses(row(**unharmed, named=0, waits=False)) == []
    assert report.fault_misses(row(**{**unharmed, "fault": "loss", "steps": 0})) == ["no step was made"]


def test_a_fault_can_be_chosen_for_every_algorithm() -> None:
    args = {
        "step_ms": 1.0,
        "stage_steps": 200,
        "seed": 0,
        "detect_s": 2.0,
        "torchft": "",
        "quick": False,
        "preload": False,
    }
    chosen = program.plans(Namespace(**args, algorithm=["bytegrad", "diloco"], only=["slow", "loss"]))
    assert [(each.settings.algorithm, each.faults) for each in chosen] == [
        ("bytegrad", ("slow", "loss")), ("diloco", ("slow", "loss")),
    ]  # fmt: skip


def test_a_system_that_cannot_run_is_in_the_table() -> None:
    why = [{"system": "torchft", "why": "it is not installed"}]
    table = report.fault_table([row()], why)
    assert (
        "| torchft |  | not run: it is not installed |" in table
        and "| bagua, bytegrad | 4 | kill -9 of a rank | 0.10 | 0.20 |" in table
    )


def test_every_algorithm_with_a_rule_is_measured() -> None:
    own = bagua.algorithms.available(builtin_only=True)
    with_rule = {each.name for each in own if bagua.algorithms.get(each.name).lost_step}
    args = {"algorithm": None, "step_ms": 1.0, "seed": 0, "detect_s": 2.0, "torchft": "", "only": None}
    args["stage_steps"] = 200
    full = program.plans(Namespace(**args, quick=False, preload=False))
    assert {each.settings.algorithm for each in full if each.part == "chaos"} == with_rule
    killed = {
        each.settings.algorithm for each in full if each.settings.system == "bagua" and "kill-store" in each.faults
    }
    assert killed == with_rule
    assert {each.settings.system for each in full} == set(systems.SYSTEMS)
    quick = program.plans(Namespace(**args, quick=True, preload=True))
    assert all(each.settings.preload == (each.settings.system in ("bagua", "elastic")) for each in quick)
    assert {each.settings.system for each in quick} == set(systems.SYSTEMS)
    assert all(each.settings.hosts == 4 for each in quick)


def test_what_is_there_is_printed_and_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "describe_machine", lambda: {"load_1min": 0.0})  # which starts a process
    file = tmp_path / "faults.json"
    there = row(table=0, step_ms=100.0)
    file.write_text(json.dumps({"rows": [there], "chaos": [], "timelines": [], "not_run": []}))
    assert program.main(["--table", "--json", str(file)]) == 0
    assert "bagua, bytegrad" in capsys.readouterr().out
    words = ["--only", "tour", "--algorithm", "bytegrad", "--fault", "kill-rank", "--quick", "--json", str(file)]
    assert program.main([*words, "--no-preload"]) == 0
    assert json.loads(file.read_text())["rows"] == [there]
    forked = row(table=0, step_ms=100.0, preload=True)
    file.write_text(json.dumps({"rows": [forked], "chaos": [], "timelines": [], "not_run": []}))
    assert program.main(words) == 0
    assert json.loads(file.read_text())["rows"] == [forked]
    assert "| bagua --preload, bytegrad |" in capsys.readouterr().out


def test_stages_are_a_part_of_what_is_run(tmp_path: Path) -> None:
    """A file of before says nothing of the stages: they were those of 200 steps."""
    settings = systems.Settings(algorithm="qadam", hosts=8)
    before = rounds.Rounds(settings, 40, 40, 900.0).facts
    del before["stage_steps"], before["preload"]
    found = {"chaos": [before]}
    assert rounds.Rounds(settings, 40, 40, 900.0).row(found) == before
    longer = rounds.Rounds(replace(settings, stage_steps=1000), 40, 40, 900.0)
    with pytest.raises(IndexError):
        longer.row(found)
    words = systems.command(replace(settings, stage_steps=1000), [SimpleNamespace(address="10.0.0.1")], 0, tmp_path)
    assert words[words.index("--stage-steps") + 1] == "1000"


def round_of(seed: int, **other: Any) -> dict[str, Any]:
    """A row of `chaos.chaos`."""
    facts = {"faults": 3, "chaos_s": 20.0, "lost_s": 0.6, "exchanges": 100, "exchanges_below_90": 2, "compared": 120}
    facts |= {"unequal": 0, "splits": 0, "steps": 200 + 100 * seed, "throughput": 0.9, "participation": 1.0}
    facts |= {"step_s": 0.1, "stall_s": [0.2, 0.1 * seed], "equal_expected": True, "problems": [], "loss": 1.5}
    return {**facts, "growth": {"threads": seed}, "load_1min": 1.0, "date": "", "seed": seed, **other}


def test_a_chaos_run_in_rounds_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def play(settings: Any, faults: int, per_hour: float, seed: int, *_: Any, multiple: int) -> tuple[Any, Any]:
        asked.append((faults, seed))
        assert multiple == rounds.LOSSES_EVERY
        return round_of(seed, faults=faults), {"round": seed}

    monkeypatch.setattr(rounds, "chaos", play)
    monkeypatch.setattr(rounds.Rounds, "_undisturbed", lambda *_: {"200": 1.5, "300": 1.25, "400": 1.0})
    found: dict[str, Any] = {name: [] for name in ("rounds", "losses", "chaos", "timelines")}
    run = rounds.Rounds(systems.Settings(algorithm="bytegrad", hosts=8), 7, 3, 600.0)
    kept: list[int] = []

    def go_on(most: int) -> int:
        return run.go_on(found, most, dict, lambda: kept.append(len(found["rounds"])))

    assert go_on(1) == 1 and asked == [(3, 0)] and "loss_ratio" not in run.row(found)
    assert go_on(2) == 2 and asked[1:] == [(3, 1), (1, 2)] and kept == [1, 2, 3]
    assert go_on(0) == 1 and run.row(found)["loss_ratio"] == pytest.approx((1.0 + 1.2 + 1.5) / 3)
    assert go_on(0) == 0 and len(found["chaos"]) == 1 and found["timelines"] == [{"round": 0}]
    other = rounds.Rounds(systems.Settings(algorithm="diloco", hosts=8), 3, 3, 600.0)
    other.go_on(found, 1, dict, lambda: None)
    assert [row["algorithm"] for row in found["chaos"]] == ["bytegrad", "diloco"], "a row of its own"


def test_rounds_are_one_row() -> None:
    bad = round_of(1, throughput=None, participation=0.5, exchanges=50, lost_s=None, problems=["stuck"], faults=1)
    del bad["loss"]
    whole = rounds.combine([round_of(0), bad], {"200": 1.25})
    assert (whole["faults"], whole["rounds"], whole["exchanges"]) == (4, 2, 150)
    assert whole["throughput"] == pytest.approx(0.9) and whole["participation"] == pytest.approx(125 / 150)
    assert whole["lost_s_per_fault"] == pytest.approx(0.2) and whole["longest_stall_s"] == pytest.approx(0.2)
    assert whole["growth"] == {"threads": 1} and whole["problems"] == ["round 2: stuck"]
    assert whole["loss_ratio"] == pytest.approx(1.2)
    facts = {"algorithm": "bytegrad", "hosts": 8, "per_hour": 600.0}
    assert "4, 600" in report.chaos_table([{**whole, **facts}])


def test_a_rank_that_was_just_killed_is_no_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has made a step not long ago, too; but no signal could be sent to it."""
    now = 100.0
    found = [process(0, 0, 3, now - 1.0), process(1, 0, 3, now - 1.0, started=now - 0.5)]
    job = SimpleNamespace(journals=SimpleNamespace(update=lambda: found), settings=systems.Settings())
    trains = chaos._trains
    assert trains(job, 0, now, 0.0) and trains(job, 1, now, now - 0.6)  # pyright: ignore[reportArgumentType]
    assert not trains(job, 0, now, now - 0.1)  # pyright: ignore[reportArgumentType]


def test_chaos_gives_up_when_too_few_hosts_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would wait for a victim for ever."""
    job = SimpleNamespace(processes=dict.fromkeys(range(8)), limit_s=0.1)
    monkeypatch.setattr(chaos, "_trains", lambda _job, index, _now, _struck: index < 3)
    with pytest.raises(Stuck, match="no more than 3 hosts"):
        chaos.inject(job, [], random.Random(0), 1, 1e9)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_rank_for_real(fork_server: ForkServer, tmp_path: Path) -> None:
    words = ("--only", "tour", "--algorithm", "gradient_allreduce", "--fault", "kill-rank")
    found, text = run_quickly(fork_server, "faults", tmp_path, *words)
    (measured,) = found["rows"]
    assert measured["problems"] == [] and measured["unequal"] == 0 and measured["compared"] > 10
    assert measured["restarted"] == [] and measured["lost_steps"] <= 1
    assert "kill -9 of a rank" in text


@pytest.mark.parametrize("words", [["--round", "0"], ["--round", "-3"], ["--per-hour", "-5"]])
def test_numbers_that_make_no_run_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(words)
    assert f"{words[0]}: expected more than 0" in capsys.readouterr().err


def test_steps_of_a_training_beside_take_no_time_unless_it_decides_how_often_weights_are_averaged() -> None:
    settings = systems.Settings(step_ms=100.0)
    times = [chaos.undisturbed(replace(settings, algorithm=name)).step_ms for name in ("bytegrad", "async")]
    assert times == [0.0, 100.0]
