"""A DeviceMesh goes wherever a group goes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import bagua
from tests.engine.training import batch
from tests.rank_pool import RankPool


def on_a_slice(path: str) -> tuple[list[float], str]:
    """Two pairs train apart; checkpoints are the pairs' own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="must have one dimension") as caught:
        bagua.distribute(model, optimizer, process_group=mesh)
    bagua.distribute(model, optimizer, "bytegrad", process_group=mesh["data"])
    for step in range(3):
        model(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    place = f"{path}/{mesh['other'].get_local_rank()}"
    bagua.checkpoint.save(place, {"model": model}, step=3, process_group=mesh["data"])
    want = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    loaded = bagua.checkpoint.load(place, {"model": model}, process_group=mesh["data"])
    assert loaded is not None and loaded.size == 2
    assert torch.equal(model.weight, want)
    bagua.detach(model)
    return want.flatten().tolist(), str(caught.value)


def test_slices_of_a_mesh_are_groups(pool: RankPool, tmp_path: object) -> None:
    weights = [weights for weights, _ in pool.run(4, on_a_slice, str(tmp_path))]
    assert weights[0] == weights[1]
    assert weights[2] == weights[3]
    assert weights[0] != weights[2]
