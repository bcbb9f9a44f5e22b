"""Trainings with settings that change all the time: the order of sums may differ from plain training, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import bagua
from bagua.algorithms import GradientAllReduce
from bagua.autotune.progress import Progress
from bagua.engine.tuning import search_space
from tests.autotune.training import DEPTH, QUICK, START, Training
from tests.rank_pool import RankPool

_axes = search_space._axes


def follow(algorithm: Any, autotune: Any, steps: int, passes: int, only: tuple[str, ...]) -> tuple[Tensor, Any]:
    """Half of the model in four buckets: what is compared is the bits, and a step costs half."""
    with pytest.MonkeyPatch.context() as patch:
        if only:
            patch.setattr(search_space, "_axes", lambda *args: {name: _axes(*args)[name] for name in only})
        training = Training(
            None, algorithm, rank=dist.get_rank(), autotune=autotune, bucket_bytes=START // 2, depth=DEPTH // 2
        )
        training.steps(steps, passes)
    found = training.weights, bagua.stats(training.model).tuning
    bagua.detach(training.model)
    return found


def compare(
    pool: RankPool,
    algorithm: Any,
    size: int,
    *,
    exact: bool,
    nodes: Any = None,
    steps: int = 25,
    passes: int = 1,
    max_turns: int = 22,
    only: tuple[str, ...] = (),
) -> list[Progress]:
    """Train with settings that change all the time, and without; returns what the ranks say of the former."""
    options = {**QUICK, "search": "random", "max_turns": max_turns}
    tuned = pool.run(size, follow, algorithm, options, steps, passes, only, nodes=nodes)
    plain = pool.run(size, follow, algorithm, False, steps, passes, only, nodes=nodes)
    for (got, _), (wanted, _) in zip(tuned, plain, strict=True):
        if exact:
            assert torch.equal(got, wanted)
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    return [progress for _, progress in tuned]


@pytest.mark.parametrize("passes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_ranks_train_the_same_bits(pool: RankPool, passes: int) -> None:
    """Of two numbers there is one order of summing."""
    for progress in compare(pool, "gradient_allreduce", 2, passes=passes, exact=True):
        assert progress.num_samples > 4
        assert progress.tuned == ("bucket_bytes", "part_bytes", "num_lanes")
        assert progress.phase == "done"


def test_the_way_of_a_sum_changes_no_bit(pool: RankPool) -> None:
    """Nor does the lane; only the cuts of buckets do."""
    only = "direct_bytes", "num_lanes"
    for progress in compare(pool, "gradient_allreduce", 3, nodes=[0, 1, 2], exact=True, only=only):
        assert progress.num_samples > 4
        assert progress.tuned == only


@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", GradientAllReduce(average=False), "local_sgd", "decentralized"]
)
def test_sums_in_another_order_differ_by_rounding(pool: RankPool, algorithm: Any) -> None:
    options = {"communication_interval": 2} if algorithm == "local_sgd" else {}
    for progress in compare(pool, bagua.algorithms.get(algorithm, **options), 3, nodes=[0, 1, 2], exact=False):
        assert progress.num_samples > (1 if algorithm == "local_sgd" else 4)
        assert progress.tuned == ("bucket_bytes", "direct_bytes", "part_bytes", "num_lanes")


def test_gossip_does_not_depend_on_cuts(pool: RankPool) -> None:
    algorithm = bagua.algorithms.get("decentralized", peer_selection_mode="shift_one")
    for progress in compare(pool, algorithm, 2, exact=True):
        assert progress.tuned == ("bucket_bytes", "part_bytes", "num_lanes")


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param("bytegrad", marks=pytest.mark.slow),  # as the next one, without feedback
        GradientAllReduce(codec="sign", error_feedback=True),
        pytest.param("low_precision_decentralized", marks=pytest.mark.slow),
        bagua.algorithms.get("low_precision_decentralized", overlap=True),
        "power_sgd",
        bagua.algorithms.get("diloco", communication_interval=2, delay=1),
    ],
)
def test_where_cuts_matter_lanes_are_tuned_only_and_no_bit_changes(pool: RankPool, algorithm: Any) -> None:
    for progress in compare(pool, algorithm, 3, nodes=[0, 1, 2], steps=20, max_turns=17, exact=True):
        assert progress.tuned == ("num_lanes",)
        assert progress.num_samples == 3, "there are four buckets"


def test_hierarchy_is_tuned_where_it_was_left_open(pool: RankPool) -> None:
    nodes = [0, 0, 1, 1]
    for progress in compare(pool, "gradient_allreduce", 4, nodes=nodes, exact=False):
        assert progress.tuned[0] == "hierarchical"
    for progress in compare(pool, GradientAllReduce(hierarchical=True), 4, nodes=nodes, steps=3, exact=True):
        assert "hierarchical" not in progress.tuned
        assert progress.settings.hierarchical
