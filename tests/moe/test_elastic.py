"""Experts in the commits of elastic training: each rank's own, in the memory of the nodes and on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bagua
from bagua import elastic
from bagua.checkpoint import CheckpointError
from bagua.elastic.memory import VARIABLE, Memory
from tests.engine.training import equal
from tests.moe import nets
from tests.rank_pool import RankPool


def begin(address: str, num_local: int, seed: int, directory: str | None) -> tuple[nets.Net, elastic.State]:
    os.environ[VARIABLE] = address
    rank = torch.distributed.get_rank()
    model = nets.Net(None, num_local, seed=seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    bagua.distribute(model, optimizer)
    return model, elastic.State(model, optimizer, None, directory=directory, disk_every=1)


def steps(model: nets.Net, state: elastic.State, first: int, last: int) -> dict[str, Tensor]:
    for step in range(first, last):
        state._objects["optimizer"].zero_grad()
        nets.loss(model, torch.distributed.get_rank(), step).backward()
        state._objects["optimizer"].step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def straight(address: str, directory: str | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Commit after three steps, and make two more, which another training has to repeat."""
    model, state = begin(address, 2, 0, directory)
    assert state.restore() is None
    at_commit = steps(model, state, 0, 3)
    state.commit()
    end = steps(model, state, 3, 5)
    state.close()
    return at_commit, end


def again(address: str, directory: str | None) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    model, state = begin(address, 2, 50, directory)
    restored = state.restore()
    assert restored is not None
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    end = steps(model, state, 3, 5)
    state.close()
    return found, end, restored.source


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_experts_and_their_moments_come_back(pool: RankPool, tmp_path: Path, source: str) -> None:
    memories = [Memory(2), Memory(2)]
    directory = str(tmp_path) if source == "disk" else None
    try:
        expected = pool.run(2, straight, memories[0].address, directory)
        address = memories[0 if source == "memory" else 1].address
        results = pool.run(2, again, address, directory)
    finally:
        for memory in memories:
            memory.close()
    for (at_commit, end), (found, ended, origin) in zip(expected, results, strict=True):
        assert origin == source and equal(found, at_commit) and equal(ended, end)
    names = [name for name in expected[0][0] if "bagua_experts" in name and "seen" not in name]
    assert names and all(not torch.equal(expected[0][0][name], expected[1][0][name]) for name in names)


def refused(address: str) -> tuple[bool, str]:
    model, state = begin(address, 4, 50, None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        state.restore()
    state.close()
    return equal(dict(model.state_dict()), before), str(error.value)


def test_another_number_of_ranks_is_refused_by_name(pool: RankPool) -> None:
    """Adam's moments of experts stay with their rank; nothing is changed by the attempt."""
    memory = Memory(2)
    try:
        pool.run(2, straight, memory.address, None)
        ((untouched, message),) = pool.run(1, refused, memory.address)
    finally:
        memory.close()
    assert untouched and "'optimizer' holds state of expert" in message and "2 ranks" in message
