"""Only the blocks of tensors that differ travel, and all ranks end with those of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bagua.comm.groups import Group
from bagua.comm.team import Team
from bagua.engine.recovery import differences
from bagua.engine.recovery.differences import replicate_differences
from tests.rank_threads import run_teams

BLOCK = 16 * 1024
CPU = torch.device("cpu")


def make() -> list[Tensor]:
    """Of several types and layouts: smaller than a block, whole blocks, more than a message, none."""
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(3000 * BLOCK // 4 + 5, generator=generator)
    table = torch.randn(64, 1024, generator=generator).t()
    return [
        *(large, table, torch.arange(7, dtype=torch.int16), torch.tensor(3.5, dtype=torch.float64), torch.empty(0, 4)),
        *(torch.tensor([True, False, True]), torch.randn(2 * BLOCK // 2, generator=generator).to(torch.bfloat16)),
    ]


def give(team: Team, changes: list[dict[int, int]], source: int, most: float) -> tuple[list[Tensor], int | None]:
    """Each rank differs from the others in the elements of `changes[rank]`, by tensor."""
    tensors = make()
    for place, at in changes[team.rank].items():
        flat = tensors[place].t() if not tensors[place].is_contiguous() else tensors[place]
        flat.view(-1)[at] = not flat.view(-1)[at] if flat.dtype is torch.bool else flat.view(-1)[at] + 1
    groups = team.open("differences")
    sent = replicate_differences(tensors, groups.world, CPU, source, most)
    groups.leave(abort=False)
    return tensors, sent


@pytest.mark.parametrize("source", [0, 1])
def test_all_ranks_end_with_the_tensors_of_one_whatever_they_held(source: int) -> None:
    tails = 5 * 4 + 7 * 2 + 8 + 3  # of the short ones
    changes = [{0: 5, 1: 40000, 6: 1}, {0: 3000 * BLOCK // 4 + 1, 3: 0, 5: 2, 6: 1}, {2: 6}]
    expected = make()
    found = run_teams(3, give, changes, source, 1.0)
    for tensors, sent in found:
        for tensor, of_source, plain in zip(tensors, found[source][0], expected, strict=True):
            assert torch.equal(tensor, of_source) and tensor.stride() == plain.stride()
        # Tensor 0: its first block and its end; 1: one of its 16 blocks; 6: the first of two; others are short.
        assert sent == 3 * BLOCK + tails
    assert not torch.equal(found[source][0][0], expected[0])


def test_equal_tensors_need_no_message() -> None:
    assert [sent for _, sent in run_teams(2, give, [{}, {}], 0, 0.0)] == [0, 0]


def test_nothing_changes_where_too_many_blocks_differ() -> None:
    """Three differ, of 3020 or so."""
    found = run_teams(2, give, [{0: 0, 6: 0}, {0: BLOCK}], 0, 2.5 / 3020)
    assert [sent for _, sent in found] == [None, None]
    assert not torch.equal(found[0][0][0], found[1][0][0])


def scattered(team: Team, sizes: list[int]) -> tuple[list[Tensor], int | None]:
    """Rank 1 lacks every third block of each tensor, and its short end."""
    tensors = [torch.arange(size, dtype=torch.int32) for size in sizes]
    if team.rank == 1:
        for tensor in tensors:
            tensor[:: 3 * BLOCK // 4] += 1
            tensor[-1] += 1
    groups = team.open("scattered")
    sent = replicate_differences(tensors, groups.world, CPU, 0)
    groups.leave(abort=False)
    return tensors, sent


def test_scattered_blocks_of_several_tensors_share_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, messages = [700 * BLOCK // 4 + 3, 5, 500 * BLOCK // 4 + 1, 3 * BLOCK // 4], list[int]()
    plain = differences.broadcast_

    def counted(group: Group, wire: Tensor, src: int) -> None:
        if group.rank == 1 and wire.dim() == 1:
            messages.append(wire.numel())
        plain(group, wire, src)

    monkeypatch.setattr(differences, "broadcast_", counted)
    found = run_teams(2, scattered, sizes)
    blocks = 234 + 167 + 1 + 1  # the last tensor has no short end: its third block is whole
    expected = blocks * BLOCK + 4 * (3 + 5 + 1)
    for tensors, sent in found:
        assert sent == expected
        for tensor, size in zip(tensors, sizes, strict=True):
            assert torch.equal(tensor, torch.arange(size, dtype=torch.int32))
    assert sum(messages) == expected
    assert len(messages) == -(-(blocks + 3) // 128), "blocks fill messages, whichever tensors they are of"
