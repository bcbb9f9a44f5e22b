"""Trainings with settings that change all the time: the order of sums may differ from plain training, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bagua
from bagua.algorithms import GradientAllReduce
from bagua.autotune.progress import Progress
from tests.autotune.training import DEPTH, QUICK, START, Training
from tests.rank_threads import run_teams


def follow(team: Any, algorithm: Any, autotune: Any, steps: int, passes: int = 1) -> tuple[Tensor, Any]:
    """Half of the model in four buckets: what is compared is the bits, and a step costs half."""
    training = Training(team, algorithm, autotune=autotune, bucket_bytes=START // 2, depth=DEPTH // 2)
    training.steps(steps, passes)
    return training.weights, bagua.stats(training.model)


def compare(
    algorithm: Any, size: int, nodes: Any = None, steps: int = 25, passes: int = 1, **how: Any
) -> list[Progress]:
    """Train with settings that change all the time, and without; returns what the ranks say of the former."""
    exact = how.pop("exact")
    tuned = run_teams(
        size, follow, algorithm, {**QUICK, "search": "random", "max_turns": 22, **how}, steps, passes, nodes=nodes
    )
    plain = run_teams(size, follow, algorithm, False, steps, passes, nodes=nodes)
    for (got, _), (wanted, _) in zip(tuned, plain, strict=True):
        if exact:
            assert torch.equal(got, wanted)
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    return [stats.tuning for _, stats in tuned]


@pytest.mark.parametrize("passes", [1, 2])
def test_two_ranks_train_the_same_bits(passes: int) -> None:
    """Of two numbers there is one order of summing."""
    for progress in compare("gradient_allreduce", 2, passes=passes, exact=True):
        assert progress.num_samples > 4
        assert progress.tuned == ("bucket_bytes", "part_bytes", "num_lanes")
        assert progress.phase == "done"


def test_sums_straight_between_ranks_are_in_the_order_of_ranks_wherever_they_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bagua.engine.tuning.search_space._sums_directly", lambda engine, hierarchy: False)
    for progress in compare("gradient_allreduce", 3, nodes=[0, 1, 2], exact=True):
        assert progress.num_samples > 4


@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", GradientAllReduce(average=False), "local_sgd", "decentralized"]
)
def test_sums_in_another_order_differ_by_rounding(algorithm: Any) -> None:
    options = {"communication_interval": 2} if algorithm == "local_sgd" else {}
    for progress in compare(bagua.algorithms.get(algorithm, **options), 3, nodes=[0, 1, 2], exact=False):
        assert progress.num_samples > (1 if algorithm == "local_sgd" else 4)
        assert progress.tuned == ("bucket_bytes", "direct_bytes", "part_bytes", "num_lanes")


def test_gossip_does_not_depend_on_cuts() -> None:
    algorithm = bagua.algorithms.get("decentralized", peer_selection_mode="shift_one")
    for progress in compare(algorithm, 2, exact=True):
        assert progress.tuned == ("bucket_bytes", "part_bytes", "num_lanes")


@pytest.mark.parametrize(
    "algorithm",
    [
        "bytegrad",
        GradientAllReduce(codec="sign", error_feedback=True),
        "low_precision_decentralized",
        bagua.algorithms.get("low_precision_decentralized", overlap=True),
        "power_sgd",
        bagua.algorithms.get("diloco", communication_interval=2, delay=1),
    ],
)
def test_where_cuts_matter_lanes_are_tuned_only_and_no_bit_changes(algorithm: Any) -> None:
    for progress in compare(algorithm, 3, nodes=[0, 1, 2], steps=20, max_turns=17, exact=True):
        assert progress.tuned == ("num_lanes",)
        assert progress.num_samples == 3, "there are four buckets"


def test_hierarchy_is_tuned_where_it_was_left_open() -> None:
    nodes = [0, 0, 1, 1]
    for progress in compare("gradient_allreduce", 4, nodes=nodes, exact=False):
        assert progress.tuned[0] == "hierarchical"
    for progress in compare(GradientAllReduce(hierarchical=True), 4, nodes=nodes, steps=3, exact=True):
        assert "hierarchical" not in progress.tuned
        assert progress.settings.hierarchical
