"""Errors of all owners, which ranks far from each other keep, go on as those of each owner, and the reverse."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bagua
from bagua.checkpoint import reshard
from bagua.comm.team import Team
from bagua.engine.startup import link_probe
from bagua.exchanges.scatter_gather import chunk_numel, is_of_all
from tests.checkpoint.runs import Case, Run, cases
from tests.checkpoint.test_reshard import after, before, parts, torch_copy
from tests.rank_threads import run_teams

FEEDBACK = cases()["feedback"]


def place(monkeypatch: pytest.MonkeyPatch, far: bool) -> None:
    monkeypatch.setattr(link_probe, "_round_trip_s", lambda team: 3600.0 if far else 0.0)


def owed(pieces: list[Tensor], n: int) -> Tensor:
    """By all owners."""
    every = {piece.numel() == len(pieces) * chunk_numel(n, len(pieces)) for piece in pieces}
    assert len(every) == 1
    return (pieces[0] if every.pop() else torch.cat(pieces))[:n]


@pytest.mark.parametrize("sizes", [(3, 4), (4, 3), (2, 3)])
@pytest.mark.parametrize("far", list(itertools.product([False, True], repeat=2)))
def test_another_number_of_ranks(
    far: tuple[bool, bool], sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(monkeypatch, far[0])
    saved = run_teams(sizes[0], before, FEEDBACK, tmp_path, nodes=range(sizes[0]))
    place(monkeypatch, far[1])
    ranks = run_teams(sizes[1], after, FEEDBACK, tmp_path, nodes=range(sizes[1]))
    loaded, later = [state for state, _ in ranks], [state for _, state in ranks]
    old, new, residuals = (parts(saved, "chunk_residual"), parts(loaded, "chunk_residual"), parts(saved, "residual"))
    assert len(new) > 1
    for key, pieces in new.items():
        n = residuals[key][0].numel()
        assert all(is_of_all(piece, n, sizes[1]) == far[1] for piece in pieces)
        if far[1]:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces)
        if key in old:
            assert torch.equal(owed(pieces, n), owed(old[key], n)) and bool(owed(pieces, n).any())
    assert all(torch.equal(state["model"]["inner.weight"], later[0]["model"]["inner.weight"]) for state in later)


def go_on(
    team: Team, saved: list[dict[str, object]] | None, case: Case = FEEDBACK
) -> tuple[dict[str, object], dict[str, object]]:
    """States after a few steps, or as they were loaded, and two steps later."""
    run = Run.start(case, team)
    run.model.dropout = 0.0  # type: ignore[assignment] - ranks are threads, which share the generator
    for number, param in enumerate(run.model.parameters()):
        generator = torch.Generator().manual_seed(number)
        param.data.copy_(0.2 * torch.randn(param.shape, generator=generator))
    run.train(range(FEEDBACK.stop), team.rank)
    if saved is not None:
        bagua.load_state_dict(run.model, saved[team.rank])
    run.settle()
    first = torch_copy(bagua.state_dict(run.model))
    run.train(range(FEEDBACK.stop, FEEDBACK.stop + 2), team.rank)
    run.settle()
    second = torch_copy(bagua.state_dict(run.model)), torch_copy(run.state()["model"])
    bagua.detach(run.model)
    return first, {"algorithm": second[0], "model": second[1]}


@pytest.mark.parametrize("far", [(False, False), (False, True), (True, False)])
def test_as_many_ranks_whose_links_are_others_now(far: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, far[0])
    ranks = run_teams(3, go_on, None, nodes=range(3))
    saved, later = [state for state, _ in ranks], [state for _, state in ranks]
    place(monkeypatch, far[1])
    again = [state for _, state in run_teams(3, go_on, saved, nodes=range(3))]
    for one, other in zip(later, again, strict=True):
        for name, value in one["model"].items():
            assert torch.equal(value, other["model"][name]), name
    residuals = parts(again, "residual")
    for key, pieces in parts(again, "chunk_residual").items():
        n = residuals[key][0].numel()
        assert not any(is_of_all(piece, n, 3) for piece in pieces), "owners form the means from then on"
        assert torch.equal(owed(pieces, n), owed(parts(later, "chunk_residual")[key], n))


def test_payloads_that_are_smaller_than_a_chunk() -> None:
    whole = torch.arange(10.0)
    every = [reshard._cut(whole, rank, torch.zeros(48), True) for rank in range(3)]
    own = [reshard._cut(whole, rank, torch.zeros(16), False) for rank in range(3)]
    assert all(torch.equal(each[:10], whole) and not each[10:].any() for each in every)
    assert torch.equal(own[0][:10], whole) and not own[1].any() and not own[2].any()
