"""Commits in memory and on the disk, and what is restored by as many ranks, fewer or more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua
from bagua.elastic.memory import Memory
from tests.daily import one_in
from tests.elastic import trainings
from tests.elastic.trainings import begin, commit_nonsense, commit_twice_but, go_on, held, straight, terminated
from tests.rank_pool import RankPool

ALGORITHMS = [row.name for row in bagua.algorithms.available(builtin_only=True)]
DIFFER = [name for name in ALGORITHMS if not bagua.algorithms.get(name).exactness.replicas_equal]


@pytest.fixture
def memories() -> Iterator[Callable[[int, int], list[str]]]:
    """Makes the memories of some nodes, each for some ranks; returns their addresses."""
    made: list[Memory] = []

    def make(num_nodes: int, num_ranks: int = 1) -> list[str]:
        new = [Memory(num_ranks) for _ in range(num_nodes)]
        made.extend(new)
        return [memory.address for memory in new]

    yield make
    for memory in made:
        memory.close()


@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized"]
)
def test_as_many_ranks_go_on_with_the_same_bits(pool: RankPool, memories: Any, algorithm: str) -> None:
    addresses = memories(1, 2)
    expected = pool.run(2, straight, algorithm, memories(1, 2), 7)
    pool.run(2, begin, algorithm, addresses, 4, 2, {})
    results = pool.run(2, go_on, algorithm, addresses, 3, {})
    for (before, after, restored), whole in zip(results, expected, strict=True):
        assert (restored.number, restored.size, restored.source) == (1, 2, "memory")
        assert (before["steps"], before["position"]) == (4, 4 * 4 * 2)
        assert torch.equal(after["weights"], whole["weights"])
        assert after["seen"] == whole["seen"][4 * 4 :]
        assert after["number"] == 2


@pytest.mark.parametrize(("algorithm", "sizes"), one_in(2, ALGORITHMS, [(3, 2), (2, 3)]))
def test_another_number_of_ranks_goes_on(pool: RankPool, memories: Any, algorithm: str, sizes: tuple[int, int]) -> None:
    """Hosts of one rank: the last one is lost with its memory, or one comes that has nothing."""
    old, new = sizes
    addresses = memories(max(sizes))
    began = pool.run(old, begin, algorithm, addresses[:old], 4, 1, {}, nodes=range(old))
    results = pool.run(new, go_on, algorithm, addresses[:new], 3, {}, nodes=range(new))
    mean = torch.stack([facts["weights"].double() for facts in began]).mean(0).float()
    for before, after, restored in results:
        assert (restored.number, restored.size) == (1, old)
        torch.testing.assert_close(before["weights"], mean, rtol=0, atol=1e-6)
        assert (before["steps"], before["position"]) == (4, 4 * 4 * old)
        assert [(each.old, each.new) for each in before["resizes"]] == [sizes]
        assert torch.isfinite(after["weights"]).all() and not torch.equal(after["weights"], before["weights"])
    if algorithm not in DIFFER:
        assert all(torch.equal(after["weights"], results[0][1]["weights"]) for _, after, _ in results)
    seen = [i for facts in began for i in facts["seen"]] + [i for _, after, _ in results for i in after["seen"]]
    assert len(set(seen)) == len(seen) == 4 * 4 * old + 3 * 4 * new


@pytest.mark.parametrize("lost", [0, 1])
def test_the_memory_of_a_host_is_on_another_one(pool: RankPool, memories: Any, lost: int) -> None:
    """Weights differ by rank; what only the lost host had comes back bit for bit."""
    addresses = memories(2)
    began = pool.run(2, begin, "decentralized", addresses, 3, 1, {}, nodes=[0, 1])
    addresses[lost] = memories(1)[0]
    results = pool.run(2, go_on, "decentralized", addresses, 1, {}, nodes=[0, 1])
    for (before, _, restored), facts in zip(results, began, strict=True):
        assert restored.source == "memory" and torch.equal(before["weights"], facts["weights"])
    assert not torch.equal(began[0]["weights"], began[1]["weights"])


def test_two_hosts_lost_at_once_are_too_many(pool: RankPool, memories: Any) -> None:
    addresses = memories(3)
    pool.run(3, begin, "decentralized", addresses, 3, 0, {}, nodes=range(3))
    results = pool.run(2, go_on, "decentralized", [addresses[0], *memories(1)], 1, {}, nodes=[0, 1])
    assert [restored for _, _, restored in results] == [None, None]


def test_what_is_equal_is_kept_once_on_each_node_and_sent_nowhere(pool: RankPool, memories: Any) -> None:
    addresses = memories(2)
    pool.run(2, begin, "gradient_allreduce", addresses, 2, 0, {}, nodes=[0, 1])
    shared = [("model", 0), ("model.bagua", 0), ("model.bagua", 1), ("optimizer", 0), ("sampler", 0), ("steps", 0)]
    for node in held(addresses):
        assert [part for part in node if part[0] != "torch.rng"] in (shared, [p for p in shared if p[1] == 0])
    one = memories(1, 2)
    pool.run(2, begin, "gradient_allreduce", one, 2, 0, {})
    assert [part for part in held(one)[0] if part[0] == "model"] == [("model", 0)]


def test_a_commit_that_fails_on_one_rank_leaves_the_one_before(pool: RankPool, memories: Any) -> None:
    addresses = memories(1, 2)
    began = pool.run(2, commit_twice_but, "decentralized", addresses, 1)
    assert all("commit 2: rank 1 of 2: OSError" in facts["error"] for facts in began)
    results = pool.run(2, go_on, "decentralized", addresses, 1, {})
    for (before, _, restored), facts in zip(results, began, strict=True):
        assert restored.number == 1 and torch.equal(before["weights"], facts["weights"])


def test_what_cannot_be_committed_is_named_on_all_ranks(pool: RankPool, memories: Any) -> None:
    for message in pool.run(2, commit_nonsense, memories(1, 2)):
        assert "commit 1: rank 1 of 2: CheckpointError: extra: holds something that is neither" in message


def test_the_disk_is_read_when_all_memory_is_lost(pool: RankPool, memories: Any, tmp_path: Path) -> None:
    options = {"directory": str(tmp_path / "commits"), "disk_every": 1}
    began = pool.run(2, begin, "bytegrad", memories(1, 2), 4, 1, options)
    assert bagua.checkpoint.steps(tmp_path / "commits") == (1,)
    results = pool.run(2, go_on, "bytegrad", memories(1, 2), 3, options)
    for (before, _, restored), facts in zip(results, began, strict=True):
        assert (restored.source, restored.number) == ("disk", 1)
        assert torch.equal(before["weights"], facts["weights"]) and before["position"] == facts["position"]
    assert bagua.checkpoint.steps(tmp_path / "commits") == (1, 2)


def test_memory_that_is_newer_than_the_disk_counts(pool: RankPool, memories: Any, tmp_path: Path) -> None:
    options = {"directory": str(tmp_path / "commits"), "disk_every": 1}
    addresses = memories(1, 2)
    pool.run(2, begin, "bytegrad", addresses, 2, 0, options)
    pool.run(2, go_on, "bytegrad", addresses, 2, {**options, "disk_every": 100})
    results = pool.run(2, go_on, "bytegrad", addresses, 1, options)
    assert [(restored.source, restored.number) for _, _, restored in results] == [("memory", 2)] * 2


@pytest.mark.parametrize("chosen", [0, 1])
def test_sigterm_to_one_rank_makes_all_commit_and_leave(
    pool: RankPool, memories: Any, tmp_path: Path, chosen: int
) -> None:
    results = pool.run(2, terminated, memories(1, 2), str(tmp_path / "commits"), chosen)
    assert results == [(143, 1, True)] * 2
    assert bagua.checkpoint.steps(tmp_path / "commits") == (1,)


def wrong_arguments(addresses: list[str]) -> None:
    for options, message in [
        ({"disk_every": 0}, "disk_every"),
        ({"keep": True}, "keep"),
        ({"grace_s": 0}, "grace_s"),
        ({"commit": 1}, "commit is reserved by State itself"),
        ({"_user": 1}, "_user"),
    ]:
        with pytest.raises(ValueError, match=message):
            trainings.training("gradient_allreduce", addresses, **options)
    model, optimizer = torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], lr=1)
    with pytest.raises(TypeError, match="model: expected an nn.Module"):
        bagua.elastic.State(3, optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer"):
        bagua.elastic.State(model, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sampler: list has no state_dict"):
        bagua.elastic.State(model, optimizer, [1])
    state = bagua.elastic.State(model, optimizer, best=0.5)
    state.best = 0.75
    assert state.best == 0.75
    with pytest.raises(AttributeError, match="worst"):
        _ = state.worst
    state.close()
    state.close()


def test_wrong_arguments(pool: RankPool, memories: Any) -> None:
    pool.run(1, wrong_arguments, memories(1, 1))
