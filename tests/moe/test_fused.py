"""The fused optimizer steps shared parameters and experts with the numbers of the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import bagua
from bagua.comm.team import Team
from tests.engine.training import equal
from tests.moe import nets
from tests.rank_threads import run_teams


def train(team: Team, algorithm: str, fused: str) -> dict[str, Tensor]:
    model = nets.Net(team, seed=team.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if fused == "before":
        bagua.optim.fuse(optimizer)
    bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=200)
    if fused == "after":
        bagua.optim.fuse(optimizer)
    for step in range(5):
        nets.loss(model, team.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    moments = {str(n): state["exp_avg"].clone() for n, state in enumerate(optimizer.state.values())}
    found = {**model.shared(), **model.experts(), **moments}
    bagua.detach(model)
    return found


@pytest.mark.parametrize("fused", ["before", "after"])
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
def test_same_numbers_as_unfused(algorithm: str, fused: str) -> None:
    plain, other = run_teams(2, train, algorithm, ""), run_teams(2, train, algorithm, fused)
    assert all(equal(a, b) for a, b in zip(plain, other, strict=True))
    experts = [name for name in plain[0] if "bagua_experts" in name and "seen" not in name]
    assert experts and not any(torch.equal(plain[0][name], plain[1][name]) for name in experts)
