"""Callbacks that average weights over time evaluate and save one model, whichever weights the ranks had."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install '.[lightning]'")

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from tests.lightning.models import flat, loader, make, saved, trainer
from tests.lightning.test_resuming import flat_of
from tests.rank_pool import RankPool

LOCAL: dict[str, Any] = {"communication_interval": 3}
CASES = [
    ("local_sgd", LOCAL, "momentum"),
    ("decentralized", {}, "momentum"),
    ("zero_one_adam", {}, "zero_one_adam"),  # its weights are equal again after an exchange
]


def averaging(kind: str) -> Callback:
    return EMAWeightAveraging(decay=0.8) if kind == "ema" else StochasticWeightAveraging(0.02, swa_epoch_start=1)


def every_epoch(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)


def evaluated(algorithm: str, options: dict[str, Any], kind: str, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of each validation, and those after training."""
    model, callbacks = make(kind), [averaging("ema"), every_epoch(folder)]
    made = trainer(algorithm, options, max_epochs=3, enable_checkpointing=True, callbacks=callbacks)
    made.fit(model, loader(), loader(32))
    made.save_checkpoint(f"{folder}/after.ckpt")
    return torch.stack(model.validated[-3:]), flat(model)


@pytest.mark.parametrize(("algorithm", "options", "kind"), CASES, ids=[case[0] for case in CASES])
def test_moving_averages_are_evaluated_as_they_are_saved(
    pool: RankPool, tmp_path: Path, algorithm: str, options: dict[str, Any], kind: str
) -> None:
    (seen, final), (others, _) = pool.run(2, evaluated, algorithm, options, kind, str(tmp_path))
    assert torch.equal(seen, others), "validation sees one model"
    for epoch in range(3):
        assert torch.equal(flat_of(saved(tmp_path / f"epoch={epoch}.ckpt")), seen[epoch])
    assert torch.equal(flat_of(saved(tmp_path / "after.ckpt")), seen[-1])
    if algorithm != "zero_one_adam":
        assert torch.equal(final, seen[-1])


def go_on(algorithm: str, options: dict[str, Any], average: str, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after 4 epochs, in one run and in two."""
    settings: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": True}
    straight, resumed = make(), make(seed=99)
    callbacks = [averaging(average), every_epoch(f"{folder}/straight")]
    trainer(algorithm, options, callbacks=callbacks, **settings).fit(straight, loader())
    callbacks = [averaging(average), every_epoch(f"{folder}/resumed")]
    trainer(algorithm, options, callbacks=callbacks, **settings).fit(
        resumed, loader(), ckpt_path=f"{folder}/straight/epoch=1.ckpt"
    )
    return flat(straight), flat(resumed)


@pytest.mark.parametrize("average", ["ema", "swa"])
def test_resumed_training_makes_the_same_averages(pool: RankPool, tmp_path: Path, average: str) -> None:
    (first, _), _ = results = pool.run(2, go_on, "local_sgd", LOCAL, average, str(tmp_path))
    for straight, resumed in results:
        assert torch.equal(straight, first) and torch.equal(resumed, first)


def beside_ddp() -> tuple[torch.Tensor, torch.Tensor]:
    mine, theirs = make(), make()
    trainer(max_epochs=2, callbacks=[averaging("ema")]).fit(mine, loader(), loader(32))
    strategy = DDPStrategy(cluster_environment=LightningEnvironment(), timeout=timedelta(seconds=30))
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, callbacks=[averaging("ema")], **settings
    ).fit(theirs, loader(), loader(32))
    return flat(mine), flat(theirs)


def test_equal_replicas_average_as_with_ddp(pool: RankPool) -> None:
    for mine, theirs in pool.run(2, beside_ddp):
        torch.testing.assert_close(mine, theirs)


def in_the_background() -> float:
    """How far the model is from its moving average after training with rounds that follow each other."""
    largest = 0.0
    for _ in range(4):
        model, ema = make(), EMAWeightAveraging(decay=0.8)
        trainer("async", {"sync_interval_ms": 0}, max_epochs=3, callbacks=[ema]).fit(model, loader())
        average: Any = ema._average_model
        largest = max(largest, float((flat(model) - flat(average)).abs().max()))
    return largest


def test_an_average_in_progress_does_not_change_what_a_callback_has_set(pool: RankPool) -> None:
    assert pool.run(2, in_the_background) == [0.0, 0.0]
