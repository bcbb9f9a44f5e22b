"""Trainers on two ranks train as a loop with `bagua.distribute` does, or as one process on all the data."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install '.[lightning]'")

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F

import bagua
from lightning_bagua.redirection import call_through_hooks
from tests.lightning.models import Adversaries, Regression, data, flat, loader, make, trainer
from tests.rank_pool import RankPool

EPOCHS = 3


def alone(accumulate: int, clip: float | None = None) -> torch.Tensor:
    """Weights after training in one process; rows are dealt out in turn, so ranks 0 and 1 make one batch of 8."""
    model = make()
    optimizer = model.configure_optimizers()
    inputs, targets = data().tensors
    for _ in range(EPOCHS):
        for number, start in enumerate(range(0, len(inputs), 8), 1):
            rows = slice(start, start + 8)
            (F.mse_loss(model.net(inputs[rows]), targets[rows]) / accumulate).backward()
            if number % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return flat(model)


class Watch(Callback):
    """Notes of what the engine did, before the module is a plain one again."""

    def __init__(self) -> None:
        self.stats: Any = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.stats = bagua.stats(pl_module)


def train(algorithm: str, options: dict[str, Any], settings: dict[str, Any], kind: str, seed: int) -> Any:
    model, watch = make(kind, seed + dist.get_rank()), Watch()
    trainer(algorithm, options, max_epochs=EPOCHS, callbacks=[watch], **settings).fit(model, loader())
    with pytest.raises(ValueError, match="not distributed"):
        bagua.stats(model)
    return flat(model), watch.stats


class Reporting(Callback):
    """Begins a report when training begins; the end of training ends it."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        bagua.metrics.report(pl_module, trainer.logger, every=5)


def reported(folder: str) -> list[tuple[str, str]]:
    logger = CSVLogger(folder, name=f"rank{dist.get_rank()}")
    trainer("bytegrad", {}, max_epochs=EPOCHS, callbacks=[Reporting()], logger=logger).fit(make(), loader())
    file = Path(logger.log_dir) / "metrics.csv"
    if not file.exists():
        return []
    with file.open() as lines:
        return [(row["step"], row["bagua/steps"]) for row in csv.DictReader(lines)]


def test_metrics_to_a_logger(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(2, reported, str(tmp_path))
    assert first == [("5", "5"), ("10", "10"), ("12", "12")]
    assert not second


def loop(algorithm: str, options: dict[str, Any], kind: str, seed: int) -> torch.Tensor:
    model = make(kind, seed + dist.get_rank())
    optimizer = model.configure_optimizers()
    bagua.distribute(model, optimizer, algorithm, **options)
    for _ in range(EPOCHS):
        for batch in loader():
            optimizer.zero_grad()
            call_through_hooks(model, "training_step", batch, 0).backward()
            optimizer.step()
    bagua.average_parameters(model)
    return flat(bagua.detach(model))


def agree(results: list[Any]) -> None:
    for weights, _ in results[1:]:
        assert torch.equal(weights, results[0][0])


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.3}], ids=str)
def test_a_step_takes_the_mean_gradient_of_all_ranks(pool: RankPool, settings: dict[str, Any]) -> None:
    accumulate = settings.get("accumulate_grad_batches", 1)
    expected = alone(accumulate, settings.get("gradient_clip_val"))
    results = pool.run(2, train, "gradient_allreduce", {}, settings, "momentum", 3)
    agree(results)
    torch.testing.assert_close(results[0][0], expected)
    steps = EPOCHS * 4 // accumulate
    assert results[0][1].steps == steps
    assert results[0][1].total.launches == steps, "backward passes that only accumulate send nothing"


@pytest.mark.parametrize(
    ("algorithm", "options", "kind"),
    [
        ("bytegrad", {"bucket_bytes": 32, "hierarchical": False}, "momentum"),
        ("qadam", {}, "qadam"),
        ("zero_one_adam", {}, "zero_one_adam"),
        ("decentralized", {}, "momentum"),
        ("low_precision_decentralized", {}, "momentum"),
        ("async", {"sync_interval_ms": 1}, "momentum"),
    ],
)
def test_every_algorithm_trains_and_leaves_one_model(
    pool: RankPool, algorithm: str, options: dict[str, Any], kind: str
) -> None:
    """Ranks start from rank 0's weights although they are seeded differently."""
    results = pool.run(2, train, algorithm, options, {}, kind, 3)
    if algorithm not in ("async", "zero_one_adam"):
        agree(results)
    if algorithm != "async":
        for weights, (got, _) in zip(pool.run(2, loop, algorithm, options, kind, 3), results, strict=True):
            assert torch.equal(got, weights), "a loop with bagua.distribute makes the same steps"
    assert results[0][1].total.bytes_sent > 0
    assert algorithm.replace("_", "") in results[0][1].algorithm.lower().replace("_", "")
    if algorithm == "bytegrad":
        assert results[0][1].num_buckets > 1
    assert loss(results[0][0]) < 0.95 * loss(flat(make(kind, 3)))


def loss(weights: torch.Tensor) -> float:
    model = make()
    nn.utils.vector_to_parameters(weights, model.parameters())
    inputs, targets = data().tensors
    return F.mse_loss(model.net(inputs), targets).item()


def by_hand() -> Any:
    torch.manual_seed(dist.get_rank())
    model, watch = Adversaries(), Watch()
    before = flat(model)
    trainer("bytegrad", {"hierarchical": False}, max_epochs=2, callbacks=[watch]).fit(model, loader())
    return flat(model), watch.stats, before


def test_manual_optimisation_of_two_optimizers(pool: RankPool) -> None:
    (one, stats, before), (other, _, _) = pool.run(2, by_hand)
    assert torch.equal(one, other)
    assert not torch.equal(one, before)
    assert stats.total.launches == 2 * (4 + 2), "a message for each of the backward passes"


def mixed(precision: str, algorithm: str) -> Any:
    model, watch = make("momentum", 3 + dist.get_rank()), Watch()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if precision == "16-mixed" else None
    plugin = MixedPrecision(precision, "cpu", scaler=scaler)  # pyright: ignore[reportArgumentType]
    made = trainer(algorithm, max_epochs=2, plugins=[plugin], callbacks=[watch])
    seen: list[torch.dtype] = []
    model.net[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    if scaler is not None and dist.get_rank() == 1:
        poison(model)
    made.fit(model, loader())
    scale = plugin.scaler.get_scale() if plugin.scaler is not None else None
    return flat(model), watch.stats.steps, scale, set(seen)


def poison(model: Regression) -> None:
    """Its first loss is infinite."""
    original, calls = model.training_step, []

    def training_step(batch: Any, batch_idx: int) -> Any:
        calls.append(batch_idx)
        return original(batch, batch_idx) * (float("inf") if len(calls) == 1 else 1.0)

    model.training_step = training_step


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
def test_mixed_precision_skips_a_step_on_all_ranks_or_on_none(pool: RankPool, algorithm: str) -> None:
    results = pool.run(2, mixed, "16-mixed", algorithm)
    for weights, steps, scale, dtypes in results:
        assert torch.isfinite(weights).all() and torch.equal(weights, results[0][0])
        assert (steps, scale) == (2 * 4 - 1, 2.0**11), "one of eight steps was skipped"
        assert dtypes == {torch.float16}


def test_bfloat16(pool: RankPool) -> None:
    results = pool.run(2, mixed, "bf16-mixed", "bytegrad")
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == (8, None, {torch.bfloat16})


class Branches(Regression):
    """Rank 1 uses nothing of the module in the second step."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and dist.get_rank() == 1:
            return torch.zeros((), requires_grad=True)
        return super().training_step(batch, batch_idx)


def branches() -> torch.Tensor:
    torch.manual_seed(0)
    model = Branches()
    trainer().fit(model, loader())
    return flat(model)


def test_a_rank_that_uses_no_parameter_takes_part(pool: RankPool) -> None:
    """What comes out of `training_step` tells the engine of the backward pass, not the gradients alone."""
    one, other = pool.run(2, branches)
    assert torch.equal(one, other)


def lbfgs() -> str:
    with pytest.raises(RuntimeError) as caught:
        trainer().fit(make("lbfgs"), loader())
    return str(caught.value)


def no_optimizer() -> int:
    model, watch = make("none"), Watch()
    trainer(callbacks=[watch]).fit(model, loader())
    return watch.stats.steps


def test_optimizers_out_of_the_ordinary(pool: RankPool) -> None:
    assert all("LBFGS evaluates its closure several times" in text for text in pool.run(2, lbfgs))
    assert pool.run(2, no_optimizer) == [4, 4]


def on_two_nodes() -> tuple[bool, int]:
    """`devices=1, num_nodes=2`: one process in each of two nodes."""
    os.environ.update({"NODE_RANK": str(dist.get_rank()), "LOCAL_RANK": "0"})  # Lightning's; put back by the pool
    model, watch = make(), Watch()
    options = {"hierarchical": True}
    made = trainer("bytegrad", options, devices=1, num_nodes=2, max_epochs=2, callbacks=[watch])
    made.fit(model, loader())
    assert (made.world_size, made.global_rank) == (2, dist.get_rank())
    return watch.stats.total.compression_ratio > 1.5, watch.stats.steps


def test_several_nodes(pool: RankPool) -> None:
    """The compressed exchange runs between the nodes."""
    assert pool.run(2, on_two_nodes, nodes=(0, 1)) == [(True, 8), (True, 8)]
