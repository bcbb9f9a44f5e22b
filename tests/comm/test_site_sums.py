"""Sums and broadcasts among the hosts of a site, in which all of their network cards take part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bagua.comm.collectives import broadcast_over_hosts_, reduce_over_hosts_
from bagua.comm.groups import Groups
from tests.rank_threads import run_threads


def sum_and_spread(groups: Groups, x_RN: Tensor) -> tuple[Tensor, Tensor, list[int]] | None:
    """The sum on the leader, what comes back, and bytes sent and received by the sum, then by the broadcast."""
    group, x_N = groups.intra, x_RN[groups.rank].clone()
    assert group is not None
    if group.size == 1:
        assert not group.of_hosts
        return None
    assert group.of_hosts
    scratch = torch.full((x_N.numel() + group.size,), float("nan"), dtype=x_N.dtype)
    reduce_over_hosts_(group, x_N, scratch)
    wire = [group.meter.sent, group.meter.received]
    total = x_N.clone()
    if group.rank > 0:
        x_N.fill_(-1.0)
    broadcast_over_hosts_(group, x_N)
    return total, x_N, [*wire, group.meter.sent - wire[0], group.meter.received - wire[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 7, 3 * 16 * 2**10 + 1, 900_001])
@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_the_sum_is_on_the_first_host_and_then_on_all(hosts: int, n: int, dtype: torch.dtype) -> None:
    x_RN = torch.randn(hosts + 1, n, generator=torch.Generator().manual_seed(n)).to(dtype)
    nodes = [f"a:{host}" for host in range(hosts)] + ["b:9"]
    found = run_threads(hosts + 1, sum_and_spread, x_RN, nodes=nodes, hierarchical=True)
    assert found[hosts] is None
    each = [result for result in found if result is not None]
    parts, sums = [part.tensor_split(hosts - 1) for part in x_RN[:hosts]], list[Tensor]()
    for owner in range(1, hosts):  # begins with its own summand; rank 0 adds its own last
        later = [(owner + k) % hosts for k in range(1, hosts)]
        sums.append(sum((parts[rank][owner - 1] for rank in later if rank), parts[owner][owner - 1]))
    expected = x_RN[0] + torch.cat(sums)
    assert torch.equal(each[0][0], expected)
    assert all(torch.equal(result, expected) for _, result, _ in each)
    whole, mine = n * x_RN.element_size(), [p.numel() * x_RN.element_size() for p in x_RN[0].tensor_split(hosts - 1)]
    assert each[0][2] == [0, whole, whole, 0]
    for own, (_, _, wire) in zip(mine, each[1:], strict=True):
        assert wire == [whole, (hosts - 2) * own, (hosts - 2) * own, whole]


def of_hosts(groups: Groups) -> list[bool | None]:
    return [None if each is None else each.of_hosts for each in (groups.world, groups.intra, groups.site, groups.inter)]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["a:0", "a:1", "b:2", "b:3"], [False, True, None, False]),
        (["a:0", "a:0", "a:1", "b:2"], [False, False, True, False]),
        (["a:0", "a:0", "b:1", "b:1"], [False, False, None, False]),
        ([0, 0, 1, 1], [False, False, None, False]),
    ],
)
def test_groups_know_whether_they_are_of_hosts(nodes: list[str | int], expected: list[bool | None]) -> None:
    assert run_threads(4, of_hosts, nodes=nodes, hierarchical=True)[0] == expected
