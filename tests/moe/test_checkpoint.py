"""Experts in checkpoints: each rank's own, spread anew over another number of ranks, and in the original's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bagua
from bagua.checkpoint import CheckpointError
from bagua.comm.team import Team
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint
from tests.engine.training import equal
from tests.moe import nets
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams


def trained(group: Any, rank: int, num_local: int, steps: int = 2) -> tuple[nets.Net, torch.optim.Optimizer]:
    model = nets.Net(group, num_local, seed=rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    bagua.distribute(model, optimizer, process_group=group)
    for step in range(steps):
        optimizer.zero_grad()
        nets.loss(model, rank, step).backward()
        optimizer.step()
    return model, optimizer


def save(team: Team, path: str, num_local: int) -> dict[str, Tensor]:
    model, optimizer = trained(team, team.rank, num_local)
    bagua.checkpoint.save(path, {"model": model, "optimizer": optimizer}, step=2, process_group=team)
    return dict(model.state_dict())


def test_each_rank_gets_its_own_experts_back(tmp_path: Path) -> None:
    def resume(team: Team) -> tuple[bool, bool]:
        model, optimizer = trained(team, team.rank, 2, 0)
        objects = {"model": model, "optimizer": optimizer}
        bagua.checkpoint.load(str(tmp_path), objects, process_group=team, rng=False)
        same = equal(dict(model.state_dict()), saved[team.rank])
        nets.loss(model, team.rank, 7).backward()
        optimizer.step()
        return same, equal(dict(model.state_dict()), saved[team.rank])

    saved = run_teams(2, save, str(tmp_path), 2)
    assert run_teams(2, resume) == [(True, False)] * 2


@pytest.mark.parametrize(("size", "num_local"), [(4, 1), (1, 4)])
def test_experts_are_spread_anew_over_another_number_of_ranks(size: int, num_local: int, tmp_path: Path) -> None:
    def resume(team: Team) -> dict[str, Tensor]:
        model, optimizer = trained(team, team.rank, num_local, 0)
        with pytest.raises(CheckpointError, match=r"'optimizer' holds state of expert .* be loaded on the 2 ranks"):
            bagua.checkpoint.load(str(tmp_path), {"model": model, "optimizer": optimizer}, process_group=team)
        bagua.checkpoint.load(str(tmp_path), {"model": model}, process_group=team)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    saved = run_teams(2, save, str(tmp_path), 2)
    loaded = run_teams(size, resume)
    for name, tensor in saved[0].items():
        if "bagua_experts" not in name:
            assert all(torch.equal(tensor, each[name]) for each in loaded), name
    for number in range(4):
        there, here = "bagua_experts.%d." % (number % 2), "bagua_experts.%d." % (number % num_local)  # noqa: UP031
        for name, tensor in loaded[number // num_local].items():
            if here in name:
                assert torch.equal(tensor, saved[number // 2][name.replace(here, there)]), name


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    def resume(team: Team) -> None:
        model = nets.Net(team, 2)
        before = dict(model.state_dict())
        with pytest.raises(CheckpointError, match="has 6 experts here .2 on each of 3 ranks. and had 4"):
            bagua.checkpoint.load(str(tmp_path), {"model": model}, process_group=team)
        assert equal(dict(model.state_dict()), before)

    run_teams(2, save, str(tmp_path), 2)
    run_teams(3, resume)


def facade(path: str, num_local: int, strict: bool) -> tuple[int, bool, dict[str, Tensor]]:
    rank = torch.distributed.get_rank()
    model, optimizer = trained(None, rank, num_local)
    saved = dict(model.state_dict())
    save_checkpoint(120, path, model, optimizer)
    fresh, other = trained(None, rank + 10, num_local, 1)
    iteration = load_checkpoint(path, fresh, other, strict=strict)
    return iteration, equal(dict(fresh.state_dict()), saved), {name: x.clone() for name, x in saved.items()}


@pytest.mark.parametrize("strict", [True, False])
def test_the_originals_files_and_names(pool: RankPool, tmp_path: Path, strict: bool) -> None:
    results = pool.run(2, facade, str(tmp_path), 2, strict)
    assert [each[:2] for each in results] == [(120, True)] * 2
    folder = tmp_path / "iter_0000120"
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        "mp_rank_00_model_states.pt",
        *(f"expert_{number}_mp_rank_00_model_states.pt" for number in range(4)),
        *(f"expert_parallel_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)),
    }
    whole = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    assert set(whole) == {"iteration", "model"} and not any("bagua_experts" in name for name in whole["model"])
    third = torch.load(folder / "expert_2_mp_rank_00_model_states.pt", weights_only=True)
    prefix = "moe.bagua_moe.experts.bagua_experts."
    assert torch.equal(third[f"{prefix}2.0.weight"], results[1][2][f"{prefix}0.0.weight"])
    state = torch.load(folder / "expert_parallel_rank_1_mp_rank_00_optim_states.pt", weights_only=True)
    assert set(state) == {"optimizer"} and state["optimizer"]["state"]
