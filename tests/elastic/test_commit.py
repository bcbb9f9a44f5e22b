"""Which commit is the newest whole one, whose parts they are, and who keeps copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua.checkpoint import CheckpointError
from bagua.checkpoint.items import Item
from bagua.elastic.commit import Commit, newest, owners_of, pack, peers, unpack


def slot(number: int, parts: list[tuple[str, int]], generation: int = 1, token: str = "a") -> dict[str, Any]:
    """A slot of a commit of two ranks: the model is the same on both, "rng" is not."""
    commit = Commit(number, generation, token, 2, {"model": "module", "rng": "rng"}, {"model": [0, 0], "rng": [0, 1]})
    table = [{"item": item, "rank": rank, "nbytes": 1, "digest": "d"} for item, rank in parts]
    return {**commit.about(), "parts": table}


WHOLE = [("model", 0), ("rng", 0), ("rng", 1)]


def test_the_newest_whole_commit_counts() -> None:
    found = newest([(0, [slot(4, WHOLE), slot(5, [("model", 0), ("rng", 0)])])])
    assert found is not None and found.commit.number == 4


def test_parts_of_several_nodes_make_a_commit_whole() -> None:
    found = newest([(0, [slot(5, [("model", 0), ("rng", 0)]), slot(4, WHOLE)]), (1, [slot(5, [("rng", 1)])])])
    assert found is not None and found.commit.number == 5
    assert found.places["rng", 1].keys() == {1} and found.places["model", 0].keys() == {0}


def test_parts_of_different_commits_with_one_number_do_not_mix() -> None:
    mixed = [(0, [slot(5, [("model", 0), ("rng", 0)], token="a")]), (1, [slot(5, [("rng", 1)], token="b")])]
    assert newest(mixed) is None


def test_of_one_number_the_later_generation_counts() -> None:
    found = newest([(0, [slot(5, WHOLE, generation=1, token="z")]), (1, [slot(5, WHOLE, generation=2, token="a")])])
    assert found is not None and found.commit.generation == 2


def test_nothing_is_found_where_there_is_nothing() -> None:
    assert newest([(0, []), (1, [])]) is None


@pytest.mark.parametrize(
    "change",
    [{"owners": {"model": [0], "rng": [0, 1]}}, {"owners": {"model": [0, 2], "rng": [0, 1]}}, {"number": "x"},
     {"kinds": {}}, {"size": -1}],
)  # fmt: skip
def test_nonsense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="malformed"):
        Commit.of({**slot(1, WHOLE), **change})


def test_owners_are_the_lowest_ranks_with_the_same_bits() -> None:
    digests = [{"w": "a", "s": "1"}, {"w": "a", "s": "2"}, {"w": "b", "s": "3"}, {"w": "b", "s": "3"}]
    assert owners_of(digests) == {"w": [0, 0, 2, 2], "s": [0, 1, 2, 2]}
    with pytest.raises(CheckpointError, match="rank 1 and rank 0 differ"):
        owners_of([{"w": "a"}, {}])


@pytest.mark.parametrize("nodes", [[[0, 1], [2, 3]], [[0], [1], [2]], [[0, 1, 2], [3]], [[0, 3], [1, 2]]])
def test_a_peer_is_on_another_node(nodes: list[list[int]]) -> None:
    node_of = {rank: at for at, node in enumerate(nodes) for rank in node}
    for rank, peer in enumerate(peers(nodes)):
        assert peer is not None and node_of[peer] != node_of[rank]


def test_one_node_has_no_peers() -> None:
    assert peers([[0, 1, 2]]) == [None, None, None]


def test_packing_is_for_plain_data() -> None:
    value = {"a": torch.arange(3), "b": [1, "x", None]}
    back = unpack(pack(Item("data", value)), "it")
    assert torch.equal(back["a"], value["a"]) and back["b"] == value["b"]
    with pytest.raises(CheckpointError, match="it: holds something"):
        unpack(pack(Item("data", {"f": Commit})), "it")
    with pytest.raises(CheckpointError, match="it: "):
        unpack(b"not a file of torch.save", "it")
