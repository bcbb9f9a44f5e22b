"""Pruning needs weights that are equal on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install '.[lightning]'")

import torch
from lightning.pytorch.callbacks import ModelPruning

from tests.lightning.models import loader, make, trainer
from tests.rank_pool import RankPool

LOCAL: dict[str, Any] = {"communication_interval": 8}


def prune(algorithm: str, options: dict[str, Any]) -> torch.Tensor | str:
    """The pruned weights, or why there are none."""
    model = make()
    callback = ModelPruning("l1_unstructured", amount=0.3, parameters_to_prune=[(model.net[0], "weight")])
    try:
        trainer(algorithm, options, max_epochs=2, callbacks=[callback]).fit(model, loader())
    except ValueError as error:
        return str(error)
    weight: Any = model.net[0].weight
    return weight.detach()


def test_ranks_are_pruned_alike(pool: RankPool) -> None:
    first, second = pool.run(2, prune, "bytegrad", {})
    assert torch.equal(first, second) and (first == 0).sum() > 0


def test_pruning_by_weights_that_differ_is_refused(pool: RankPool) -> None:
    for said in pool.run(2, prune, "local_sgd", LOCAL):
        assert "ModelPruning does not work with 'local_sgd'" in said and "'gradient_allreduce'" in said
