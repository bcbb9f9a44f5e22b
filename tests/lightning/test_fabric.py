"""Loops written with Fabric train as a loop with `bagua.distribute` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install '.[lightning]'")

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import nn

import bagua
from lightning_bagua import BaguaFabricStrategy, BaguaStrategy
from tests.engine.training import Net, batch, equal, seeded, values
from tests.rank_pool import RankPool


def fabric(algorithm: str, **options: Any) -> Fabric:
    strategy = BaguaFabricStrategy(algorithm, cluster_environment=LightningEnvironment(), **options)
    made = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    made.launch()
    return made


def make(algorithm: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(Net, dist.get_rank())
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = bagua.optim.QAdam(params, lr=0.01, warmup_steps=2) if algorithm == "qadam" else None
    return model, optimizer or torch.optim.SGD(params, lr=0.05, momentum=0.9)


def with_fabric(algorithm: str, how: str, path: str) -> tuple[dict[str, Any], int, int]:
    model, optimizer = make(algorithm)
    run = fabric(algorithm)
    if how == "apart":
        wrapped: Any = run.setup_module(model)
        step: Any = run.setup_optimizers(optimizer)
    else:
        wrapped, step = run.setup(model, optimizer)
    for number in range(8):
        last = number % 2 == 1
        with run.no_backward_sync(wrapped, enabled=not last):
            run.backward(wrapped(batch(dist.get_rank(), number)).square().mean())
        if last:
            step.step()
            step.zero_grad()
    stats = bagua.stats(model)
    run.save(Path(path) / f"{algorithm}-{how}.ckpt", {"model": wrapped})
    saved = torch.load(Path(path) / f"{algorithm}-{how}.ckpt", weights_only=True)["model"]
    # of all ranks: where replicas differed they are one model now
    assert all(torch.equal(saved[name], param) for name, param in model.named_parameters())
    return values(bagua.detach(model)), stats.steps, stats.total.bytes_sent


def with_a_loop(algorithm: str) -> tuple[dict[str, Any], int, int]:
    model, optimizer = make(algorithm)
    bagua.distribute(model, optimizer, algorithm)
    for number in range(8):
        last = number % 2 == 1
        if last:
            model(batch(dist.get_rank(), number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with bagua.no_sync(model):
                model(batch(dist.get_rank(), number)).square().mean().backward()
    stats = bagua.stats(model)
    bagua.average_parameters(model)
    return values(bagua.detach(model)), stats.steps, stats.total.bytes_sent


RUNS = [(algorithm, how) for algorithm in ("bytegrad", "local_sgd") for how in ("together", "apart")]


@pytest.mark.parametrize(("algorithm", "how"), [*RUNS, ("qadam", "together")])
def test_trains_as_a_loop_does(pool: RankPool, tmp_path: Path, algorithm: str, how: str) -> None:
    expected = pool.run(2, with_a_loop, algorithm)
    for (found, steps, sent), (want, want_steps, want_sent) in zip(
        pool.run(2, with_fabric, algorithm, how, str(tmp_path)), expected, strict=True
    ):
        assert equal(list(found.values()), list(want.values()))
        assert (steps, sent) == (want_steps, want_sent)


def refused() -> str:
    model, _ = make("qadam")
    with pytest.raises(ValueError) as caught:
        fabric("qadam").setup_module(model)
    return str(caught.value)


def test_an_algorithm_that_needs_its_optimizer_says_so(pool: RankPool) -> None:
    for message in pool.run(2, refused):
        assert "'qadam' needs exactly one bagua.optim.QAdam" in message


@pytest.mark.filterwarnings("ignore:The .srun. command is available")
def test_names_and_options() -> None:
    assert "bagua" in STRATEGY_REGISTRY
    assert type(Fabric(accelerator="cpu", devices=1, strategy="bagua").strategy) is BaguaFabricStrategy
    with pytest.raises(TypeError, match="bucket_cap_mb: an argument of DistributedDataParallel"):
        BaguaFabricStrategy(bucket_cap_mb=25)
    with pytest.raises(ValueError, match="invalid strategy"):
        Fabric(accelerator="cpu", devices=1, strategy=BaguaStrategy())  # pyright: ignore[reportArgumentType]
