"""A training over sites is that of the choice of its trial; states and checkpoints keep it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from bagua.algorithms import Warmup
from bagua.algorithms.base import Algorithm
from bagua.algorithms.registry import get
from bagua.checkpoint.rank_state import load_rank_state, save_rank_state
from bagua.comm.team import Team
from bagua.engine import binding
from bagua.engine.distributed_module import attachment_of
from bagua.engine.tuning.site_trial import Trial
from bagua.exchanges import AllReduce
from tests.engine.test_site_trial import HOSTS
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams


def prepare(team: Team, algorithm: str | Algorithm, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    for layer in model:
        assert isinstance(layer, nn.Linear)
        layer.weight.data.copy_(torch.randn(40, 40, generator=torch.Generator().manual_seed(1)) / 6)
        layer.bias.data.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, algorithm, process_group=team, num_lanes=2, bucket_bytes=8000, **options)
    return model, optimizer


def steps(team: Team, model: nn.Module, optimizer: torch.optim.Optimizer, which: Sequence[int]) -> list[Tensor]:
    for step in which:
        optimizer.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * team.rank + step))
        model(x).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


EDEN = {"codec": "eden", "error_feedback": True}


def train(team: Team, algorithm: str | Algorithm, options: dict[str, Any]) -> tuple[list[Tensor], bagua.Stats]:
    model, optimizer = prepare(team, algorithm, options)
    weights, stats = steps(team, model, optimizer, range(4)), bagua.stats(model)
    bagua.detach(model)
    return weights, stats


def decide(monkeypatch: pytest.MonkeyPatch, flat_wins: bool) -> list[int]:
    """Have trials end so; returns where they are counted."""
    begun: list[int] = []

    def decided(times: Any, team: Team, *args: Any) -> Trial:
        begun.append(team.rank)
        return Trial(2.0, 1.0, 4, "") if flat_wins else Trial(1.0, 2.0, 4, "")

    monkeypatch.setattr(binding, "run_trial", decided)
    return begun


@pytest.mark.parametrize("flat_wins", [True, False])
def test_training_is_that_of_the_choice(flat_wins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = run_teams(4, train, "bytegrad", {**EDEN, "hierarchical": not flat_wins}, nodes=HOSTS)
    begun = decide(monkeypatch, flat_wins)
    found = run_teams(4, train, "bytegrad", EDEN, nodes=HOSTS)
    assert sorted(begun) == [0, 1, 2, 3], "once on each rank"
    for (mine, stats), (theirs, others) in zip(found, given, strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert stats.algorithm == others.algorithm and f"hierarchical={not flat_wins}" in stats.algorithm
        assert stats.total.bytes_sent == others.total.bytes_sent
        assert any(each.startswith("sites: ") for each in stats.notices)


def test_a_warm_up_hands_over_to_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    then = get("bytegrad", hierarchical=False)
    given = run_teams(4, train, Warmup(2, get("gradient_allreduce", hierarchical=True), then), {}, nodes=HOSTS)
    decide(monkeypatch, flat_wins=True)
    found = run_teams(4, train, Warmup(2), {}, nodes=HOSTS)
    assert all(map(torch.equal, found[0][0], given[0][0])) and found[0][1].algorithm == given[0][1].algorithm


@pytest.mark.parametrize(
    "hosts", [HOSTS, ["a:0", "a:1", "b:2"], ["a:0", "a:0", "a:1", "b:2", "b:3"]], ids=["shares", "unlike", "levels"]
)
def test_a_trial_changes_nothing_but_the_choice(hosts: list[str]) -> None:
    """A real one: however it ends."""
    found = run_teams(len(hosts), train, "bytegrad", EDEN, nodes=hosts)
    notices = {next(each for each in stats.notices if each.startswith("sites: ")) for _, stats in found}
    assert len(notices) == 1 and "0.0 MiB" in notices.pop()
    chosen = "hierarchical=True" in found[0][1].algorithm
    given = run_teams(len(hosts), train, "bytegrad", {**EDEN, "hierarchical": chosen}, nodes=hosts)
    for (mine, stats), (theirs, others) in zip(found, given, strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert (stats.total.bytes_sent, stats.total.launches) == (others.total.bytes_sent, others.total.launches)


def resume(team: Team, trained_before: bool) -> tuple[list[Tensor], list[Tensor], str]:
    """Weights of 4 steps, and of 2 steps that go on from a state that was saved after the second of these."""
    begun: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        team.all_gather_bytes("in turns", b"")
        if team.rank == 0:
            decide(patch, flat_wins=True)
        team.all_gather_bytes("flat wins", b"")
        model, optimizer = prepare(team, "bytegrad", EDEN)
        weights = steps(team, model, optimizer, range(2))
        saved = bagua.state_dict(model)
        expected = steps(team, model, optimizer, range(2, 4))
        bagua.detach(model)
        team.all_gather_bytes("before", b"")
        if team.rank == 0:
            begun = decide(patch, flat_wins=False)
        team.all_gather_bytes("sites win", b"")
        model, optimizer = prepare(team, "bytegrad", EDEN)
        if trained_before:
            steps(team, model, optimizer, range(7, 9))
        bagua.load_state_dict(model, saved)
        with torch.no_grad():
            for param, weight in zip(model.parameters(), weights, strict=True):
                param.copy_(weight)
        found = steps(team, model, optimizer, range(2, 4))
        told = bagua.stats(model).algorithm
        bagua.detach(model)
        team.all_gather_bytes("after", b"")
        if team.rank == 0:
            assert len(begun) == (4 if trained_before else 0), "a state that is loaded has the choice"
    return expected, found, told


@pytest.mark.parametrize("trained_before", [False, True])
def test_a_state_goes_on_with_the_choice_it_was_saved_with(trained_before: bool) -> None:
    for expected, found, told in run_teams(4, resume, trained_before, nodes=HOSTS):
        assert "hierarchical=False" in told and all(map(torch.equal, expected, found))


def save(team: Team, folder: Path) -> None:
    model, optimizer = prepare(team, "bytegrad", EDEN)
    steps(team, model, optimizer, range(2))
    bagua.checkpoint.save(folder, {"model": model, "optimizer": optimizer}, step=2, process_group=team)
    assert "hierarchical=False" in bagua.stats(model).algorithm
    bagua.detach(model)


def load(team: Team, folder: Path) -> tuple[str, list[Tensor], Any]:
    model, optimizer = prepare(team, "bytegrad", EDEN)
    bagua.checkpoint.load(folder, {"model": model, "optimizer": optimizer}, process_group=team)
    states = bagua.state_dict(model)["states"]
    weights, told = steps(team, model, optimizer, range(2, 4)), bagua.stats(model).algorithm
    bagua.detach(model)
    return told, weights, states


@pytest.mark.parametrize("hosts", [HOSTS, ["a:0", "a:1", "b:2", "b:3", "c:4", "c:5"]])
def test_a_checkpoint_goes_on_with_the_choice(
    hosts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(monkeypatch, flat_wins=True)
    run_teams(4, save, tmp_path, nodes=HOSTS)
    begun = decide(monkeypatch, flat_wins=False)
    found = run_teams(len(hosts), load, tmp_path, nodes=hosts)
    assert not begun, "a checkpoint decides instead of a trial"
    for told, weights, states in found:
        assert "hierarchical=False" in told and all(map(torch.equal, weights, found[0][1]))
        assert states and all("Hierarchical" not in each["exchange"] for each in states)


def algorithm_after(team: Team, options: dict[str, Any], load_one: Callable[..., None]) -> str:
    """What runs in a new training after `load_one(team, model, optimizer)`."""
    model, optimizer = prepare(team, "bytegrad", options)
    load_one(team, model, optimizer)
    told = bagua.stats(model).algorithm
    bagua.detach(model)
    return told


def test_where_the_user_has_decided_otherwise_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, flat_wins=True)
    run_teams(4, save, tmp_path, nodes=HOSTS)

    def load_one(team: Team, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(ValueError, match="saved with algorithm .*hierarchical=False.*, loaded into"):
            bagua.checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer}, process_group=team)

    told = run_teams(4, algorithm_after, {**EDEN, "hierarchical": True}, load_one, nodes=HOSTS)
    assert all("hierarchical=True" in each for each in told)


def test_a_state_that_does_not_fit_changes_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, flat_wins=False)

    def load_one(team: Team, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        steps(team, model, optimizer, range(1))
        saved = bagua.state_dict(model)
        text = saved["algorithm"].replace("hierarchical=True", "hierarchical=False")
        with pytest.raises(ValueError, match="saved with size 9"):
            bagua.load_state_dict(model, {**saved, "algorithm": text, "bound": text, "size": 9})

    assert all("hierarchical=True" in told for told in run_teams(4, algorithm_after, EDEN, load_one, nodes=HOSTS))


def test_a_state_of_the_start_can_be_loaded_after_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, flat_wins=True)

    def rank_main(team: Team) -> tuple[str, int]:
        model, optimizer = prepare(team, "bytegrad", EDEN)
        saved = bagua.state_dict(model)
        steps(team, model, optimizer, range(2))
        bagua.load_state_dict(model, saved)
        steps(team, model, optimizer, range(2))
        stats = bagua.stats(model)
        bagua.detach(model)
        return stats.algorithm, stats.steps

    assert all("hierarchical=False" in told and n == 2 for told, n in run_teams(4, rank_main, nodes=HOSTS))


def test_to_pass_the_choice_repeats_a_run_whatever_fits_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    def bucket_bytes(team: Team, options: dict[str, Any]) -> tuple[int, ...]:
        model = nn.Sequential(*(nn.Linear(400, 400) for _ in range(6)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, "bytegrad", process_group=team, **options)
        model(torch.randn(2, 400)).sum().backward()
        optimizer.step()
        found = bagua.stats(model).bucket_bytes
        bagua.detach(model)
        return found

    given = [run_teams(6, bucket_bytes, {"hierarchical": each}, nodes=[*HOSTS, "c:4", "c:5"]) for each in (True, False)]
    for flat_wins, expected in zip((False, True), given, strict=True):
        decide(monkeypatch, flat_wins)
        assert run_teams(6, bucket_bytes, {}, nodes=[*HOSTS, "c:4", "c:5"]) == expected and len(expected[0]) > 1


@pytest.mark.parametrize("saved_after", [0, 1, 3])
@pytest.mark.parametrize("trained", [0, 1, 3])
def test_a_warm_up_goes_on_with_the_choice_on_both_sides_of_its_switch(
    saved_after: int, trained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_one(team: Team) -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
        model, optimizer = prepare(team, Warmup(2, then=get("bytegrad", **EDEN)), {})
        weights = steps(team, model, optimizer, range(saved_after))
        saved = bagua.state_dict(model)
        expected = steps(team, model, optimizer, range(saved_after, 5))
        bagua.detach(model)
        return saved, weights, expected

    def load_one(team: Team) -> tuple[list[Tensor], str]:
        model, optimizer = prepare(team, Warmup(2, then=get("bytegrad", **EDEN)), {})
        steps(team, model, optimizer, range(trained))
        saved, weights, _ = told[team.rank]
        bagua.load_state_dict(model, saved)
        with torch.no_grad():
            for param, weight in zip(model.parameters(), weights, strict=True):
                param.copy_(weight)
        found, algorithm = steps(team, model, optimizer, range(saved_after, 5)), bagua.stats(model).algorithm
        bagua.detach(model)
        return found, algorithm

    decide(monkeypatch, flat_wins=True)
    told = run_teams(4, save_one, nodes=HOSTS)
    decide(monkeypatch, flat_wins=not saved_after)
    for (found, algorithm), (_, _, expected) in zip(run_teams(4, load_one, nodes=HOSTS), told, strict=True):
        assert "ByteGrad(hierarchical=False" in algorithm
        assert all(map(torch.equal, found, expected)) or not saved_after, "else residuals are those of later steps"


def through_a_framework(folder: Path, flat_wins: bool, loads: bool) -> tuple[str, list[str] | None, int]:
    """What Accelerate and Transformers add to their checkpoints; on a rank."""
    with mock.patch.dict(os.environ, BAGUA_SITE="ab"[dist.get_rank() // 2]), pytest.MonkeyPatch.context() as patch:
        begun = decide(patch, flat_wins)
        model = nn.Linear(40, 40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, "bytegrad", **EDEN)
        remarks = load_rank_state(folder, [(model, [optimizer])]) if loads else None
        for _ in range(2):
            model(torch.ones(2, 40)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not loads:
            save_rank_state(folder, [(model, [optimizer])], step=2)
        told, count = bagua.stats(model).algorithm, bagua.stats(model).steps
        bagua.detach(model)
        return f"{told} {len(begun)}", remarks, count


def test_a_framework_goes_on_with_the_choice(pool: RankPool, tmp_path: Path) -> None:
    pool.run(4, through_a_framework, tmp_path, True, False, nodes=range(4))
    for told, remarks, count in pool.run(4, through_a_framework, tmp_path, False, True, nodes=range(4)):
        assert "hierarchical=False" in told and told.endswith(" 0"), "the checkpoint decided, without a trial"
        assert remarks == [""] and count == 4


def timed(team: Team, fails: bool) -> str:
    """Of a trial's exchange of the first elements of two buckets."""
    model, optimizer = prepare(team, "bytegrad", {"hierarchical": True})
    steps(team, model, optimizer, range(1))
    engine = attachment_of(model).engine
    before = bagua.stats(model).total.bytes_sent
    if fails and team.rank == 1:
        engine.pool.sever()
    payloads = {0: torch.full((1000,), float(team.rank)), 1: torch.arange(7.0) * team.rank}
    try:
        seconds = engine.dispatcher.time_s(AllReduce(), payloads)
    except bagua.CommunicationError as error:
        return str(error)
    assert seconds > 0 and bagua.stats(model).total.bytes_sent == before
    assert torch.equal(payloads[0], torch.full((1000,), 1.5)) and torch.equal(payloads[1], torch.arange(7.0) * 1.5)
    steps(team, model, optimizer, range(1))
    bagua.detach(model)
    return ""


def test_an_exchange_that_is_timed_takes_place() -> None:
    assert run_teams(4, timed, False, nodes=HOSTS) == [""] * 4


def test_one_that_fails_is_an_error_of_communication_on_all_ranks() -> None:
    assert all(run_teams(4, timed, True, nodes=HOSTS))


def test_a_state_of_before_the_trial_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = decide(monkeypatch, flat_wins=True)

    def late(team: Team) -> str:
        model, optimizer = prepare(team, "bytegrad", EDEN)
        bagua.load_state_dict(model, bagua.state_dict(model))
        steps(team, model, optimizer, range(1))
        told = bagua.stats(model).algorithm
        bagua.detach(model)
        return told

    assert all("hierarchical=False" in told for told in run_teams(4, late, nodes=HOSTS)) and len(begun) == 4
