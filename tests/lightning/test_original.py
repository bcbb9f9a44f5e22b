"""What Lightning 1.9.5 tested of its own Bagua strategy, and its other duties: one device, QAdam, async, reductions."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install '.[lightning]'")

import torch
from torch import Tensor

import bagua
from tests.examples.scripts import ROOT
from tests.lightning.models import Adversaries, Regression, data, flat, loader, make, trainer
from tests.rank_pool import RankPool

ALGORITHMS = ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "async"]


class Scheduled(Regression):
    """QAdam with a learning rate that is halved after each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = bagua.optim.QAdam(self.parameters(), lr=0.05, warmup_steps=4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def one_device(algorithm: str) -> tuple[bool, bool]:
    """A quick run on a single device, validation included."""
    model = make()
    before = flat(model)
    trainer(algorithm, devices=1, fast_dev_run=True).fit(model, loader(), torch.utils.data.DataLoader(data()))
    return bool(flat(model).isfinite().all()), torch.equal(flat(model), before)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_device(pool: RankPool, algorithm: str) -> None:
    assert pool.run(1, one_device, algorithm) == [(True, False)]


def scheduled(devices: int) -> tuple[Tensor, float]:
    torch.manual_seed(5)
    model = Scheduled()
    fit = trainer("qadam", devices=devices, max_epochs=3)
    fit.fit(model, loader())
    return flat(model), model.trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("devices", [1, 2])
def test_qadam_with_a_scheduler(pool: RankPool, devices: int) -> None:
    results = pool.run(devices, scheduled, devices)
    assert all(torch.equal(weights, results[0][0]) and lr == 0.05 / 8 for weights, lr in results)
    assert results[0][0].isfinite().all()


def wrong_optimizer() -> str:
    with pytest.raises(ValueError) as error:
        trainer("qadam", devices=1).fit(make("momentum"), loader())
    return str(error.value)


def test_qadam_names_the_optimizer_that_it_needs(pool: RankPool) -> None:
    (message,) = pool.run(1, wrong_optimizer)
    assert "QAdam" in message and "SGD" in message


def by_hand() -> bool:
    torch.manual_seed(2)
    model = Adversaries()
    before = flat(model)
    trainer("bytegrad", devices=1, limit_train_batches=1).fit(model, loader())
    return not torch.equal(flat(model), before)


def test_manual_optimisation_on_one_device(pool: RankPool) -> None:
    assert pool.run(1, by_hand) == [True]


def averaged() -> tuple[float, Tensor]:
    model = make()
    trainer("async", {"sync_interval_ms": 1}, fast_dev_run=True).fit(model, loader(), loader())
    return max(param.norm().item() for param in model.parameters()), flat(model)


def test_async_on_two_devices_stays_small_and_ends_with_one_model(pool: RankPool) -> None:
    (norm, first), (_, second) = pool.run(2, averaged)
    assert norm < 3 and torch.equal(first, second)


class Reduces(Regression):
    """Calls what the strategy offers to all ranks."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        strategy, mine = self.trainer.strategy, torch.tensor([1.0 + self.global_rank])
        if batch_idx == 0:
            self.found = {
                **{op: strategy.reduce(mine.clone(), reduce_op=op).item() for op in ("mean", "avg", "sum")},
                "gathered": strategy.all_gather(mine).flatten().tolist(),
                "first": strategy.broadcast(mine.item(), 0),
            }
        return super().training_step(batch, batch_idx)


def reduced() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Reduces()
    trainer(max_steps=2).fit(model, loader())
    return model.found


def test_reductions_of_the_strategy(pool: RankPool) -> None:
    expected = {"mean": 1.5, "avg": 1.5, "sum": 3.0, "gathered": [1.0, 2.0], "first": 1.0}
    assert pool.run(2, reduced) == [expected] * 2


@pytest.mark.process
def test_the_name_needs_one_import() -> None:
    """Lightning's only entry points make callbacks, after the strategy was chosen. Where that changes, change ours."""
    words = "from lightning.pytorch.strategies import StrategyRegistry as s; names = s.available_strategies; "
    words += "print('bagua' in names()); import lightning_bagua; print('bagua' in names())"
    command = [sys.executable, "-W", "ignore", "-c", words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "True"]
