"""Groups of some ranks, and torch's groups as Bagua's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.rank_pool import RankPool

SIZE = 4


def _groups() -> list[float]:
    import bagua.torch_api as api
    from bagua.torch_api.communication import CommMember, from_torch_group, new_group

    rank, size = dist.get_rank(), dist.get_world_size()
    odd = new_group(ranks=[r for r in range(size) if r % 2])
    tensor = torch.rand(100, generator=torch.Generator().manual_seed(rank)) * rank
    api.allreduce(tensor, tensor, comm=odd.get_global_communicator())
    for members in ([r for r in range(size) if r % 3 == 1], [r for r in range(size) if r % 2 == 0]):
        torch_group: Any = dist.new_group(members)
        communicator: Any = from_torch_group(torch_group).get_global_communicator()
        if rank in members:
            assert communicator.rank() == dist.get_rank(torch_group) == members.index(rank)
            assert communicator.nranks() == dist.get_world_size(torch_group) == len(members)
        else:
            assert communicator is CommMember.NON_COMM_MEMBER
    return tensor.tolist()


def test_groups_of_some_ranks(pool: RankPool) -> None:
    found = pool.run(SIZE, _groups)
    assert found[1] == found[3] and found[0] == [0.0] * 100 and found[2] != found[1]
