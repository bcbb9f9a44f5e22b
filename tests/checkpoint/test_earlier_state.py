"""State that earlier versions saved is loaded; what is not theirs is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua
from bagua.comm.team import Team
from bagua.engine.reducer.bucketing import Plan, check_plan
from tests.checkpoint.runs import Run, cases
from tests.rank_threads import run_teams

STOP = 5


def load_with(team: Team, name: str) -> str:
    """The error, after a state has been loaded that has another tensor."""
    run = Run.start(cases()["feedback"], team)
    run.train(range(STOP), team.rank)
    run.settle()
    saved = copy.deepcopy(bagua.state_dict(run.model))
    for entry in saved["states"]:
        entry["tensors"] |= {name: torch.ones(16)}
    run.train(range(STOP, STOP + 1), team.rank)
    try:
        bagua.load_state_dict(run.model, saved)
    except ValueError as error:
        return str(error)
    finally:
        now = bagua.state_dict(run.model)
        bagua.detach(run.model)
    names = {key for entry in now["states"] for key in entry["tensors"]}
    kept = [
        (entry["tensors"]["residual"], other["tensors"]["residual"])
        for entry, other in zip(saved["states"], now["states"], strict=True)
    ]
    assert names == {"residual"} and all(torch.equal(*each) for each in kept)
    return ""


def test_two_ranks_load_what_they_saved_when_chunks_had_residuals() -> None:
    assert run_teams(2, load_with, "chunk_residual") == ["", ""]
    assert all("unexpected tensors" in error for error in run_teams(2, load_with, "others"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: None, r"expected what bagua.state_dict\(model\) returned, got NoneType"),
        (lambda state: {}, r"not made by bagua.state_dict\(\), as it has no 'version'"),
        (lambda state: {**state, "version": 1}, "version 1, expected 3: another Bagua made it"),
    ],
)
def test_what_is_no_state_of_an_algorithm_is_told_from_one_of_another_version(change: Any, message: str) -> None:
    model = torch.nn.Linear(2, 2)
    bagua.distribute(model, torch.optim.SGD(model.parameters(), lr=1), "bytegrad", process_group=Team.alone())
    with pytest.raises((TypeError, ValueError), match=message):
        bagua.load_state_dict(model, change(bagua.state_dict(model)))
    bagua.detach(model)


def small(kind: type[torch.optim.Optimizer], team: Team, algorithm: Any, *, frozen: bool = False) -> Any:
    """Three layers, of which the first one can be frozen, and their optimizer."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    model[0].requires_grad_(not frozen)
    optimizer = kind([param for param in model.parameters() if param.requires_grad], lr=0.01)  # type: ignore[call-arg]
    return bagua.distribute(model, optimizer, algorithm, process_group=team), optimizer


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def loaded_with(
    team: Team, before: type[torch.optim.Optimizer], now: type[torch.optim.Optimizer], algorithm: str, known: bool
) -> str:
    """The error where a state is loaded into a module that another optimizer steps."""
    model, optimizer = small(before, team, algorithm)
    steps(model, optimizer)
    saved = copy.deepcopy(bagua.state_dict(model))
    assert saved["optimizers"] == [before.__name__]
    if not known:
        del saved["optimizers"]
    bagua.detach(model)
    model, optimizer = small(now, team, algorithm)
    try:
        bagua.load_state_dict(model, saved)
        steps(model, optimizer)
    except ValueError as error:
        return str(error)
    finally:
        bagua.detach(model)
    return ""


ADAM, SGD = torch.optim.Adam, torch.optim.SGD
TOLD = "the optimizers were Adam when it was saved and are SGD now"


@pytest.mark.parametrize("algorithm", ["local_sgd", "decentralized"])
def test_a_state_of_other_optimizers_says_so_where_it_does_not_fit(algorithm: str) -> None:
    for error in run_teams(2, loaded_with, ADAM, SGD, algorithm, True):
        assert TOLD in error and "has shape" in error and "before bagua.distribute()" in error
    for error in run_teams(2, loaded_with, ADAM, SGD, algorithm, False):
        assert "optimizers were" not in error and "has shape" in error, "an earlier version did not save them"


@pytest.mark.parametrize("known", [True, False])
def test_a_state_of_other_optimizers_is_loaded_where_it_fits(known: bool) -> None:
    assert run_teams(2, loaded_with, SGD, ADAM, "local_sgd", known) == ["", ""]
    assert run_teams(2, loaded_with, ADAM, SGD, "bytegrad", known) == ["", ""]


def loaded_from_a_checkpoint(team: Team, path: str, algorithm: Any) -> str:
    """The error where an algorithm has another default for the optimizer of now."""
    model, optimizer = small(ADAM, team, algorithm)
    steps(model, optimizer)
    bagua.checkpoint.save(path, {"model": model}, step=1, process_group=team)
    bagua.detach(model)
    model, _ = small(SGD, team, algorithm)
    with pytest.raises(ValueError) as caught:
        bagua.checkpoint.load(path, {"model": model}, process_group=team)
    bagua.detach(model)
    return str(caught.value)


def test_another_algorithm_because_of_other_optimizers(tmp_path: Path) -> None:
    algorithm = bagua.algorithms.GradientAllReduce(codec="eden:bits=2")
    for error in run_teams(2, loaded_from_a_checkpoint, str(tmp_path), algorithm):
        assert "error_feedback=True" in error and f"({TOLD}); pass the same algorithm" in error


def loaded_frozen(team: Team, path: str, algorithm: str, frozen_before: bool) -> tuple[str, bool]:
    """The error where other parameters are trained than before, and whether weights are as they were."""
    model, optimizer = small(SGD, team, algorithm, frozen=frozen_before)
    steps(model, optimizer)
    bagua.checkpoint.save(path, {"model": model}, step=1, process_group=team)
    bagua.detach(model)
    model, _ = small(SGD, team, algorithm, frozen=not frozen_before)
    before = copy.deepcopy(model.state_dict())
    try:
        bagua.checkpoint.load(path, {"model": model}, process_group=team)
    except ValueError as error:
        return str(error), all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    finally:
        bagua.detach(model)
    return "", False


@pytest.mark.parametrize("algorithm", ["bytegrad", "diloco"])
@pytest.mark.parametrize("frozen_before", [True, False])
def test_parameters_that_do_not_fit_are_named_before_weights_change(
    algorithm: str, frozen_before: bool, tmp_path: Path
) -> None:
    what = "it lacks" if frozen_before else "it also has"
    for error, unchanged in run_teams(2, loaded_frozen, str(tmp_path), algorithm, frozen_before):
        assert f"its parameters are not those that the module trains: {what} '0.bias', '0.weight'" in error
        assert unchanged


def test_three_parameters_are_named() -> None:
    plan = Plan((("a", "e", "d"), ("c", "b")))
    with pytest.raises(ValueError, match=r"it also has 'b', 'c', 'd' and 1 more; it lacks 'f';"):
        check_plan(plan, ["a", "f"])
    check_plan(plan, ["b", "a", "c", "d", "e"])
