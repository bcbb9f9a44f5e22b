"""Small LightningModules, and Trainers that write nothing but what a test asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bagua
from bagua.algorithms import Algorithm
from lightning_bagua import BaguaStrategy

ROWS, WIDTH = 32, 5


def data() -> TensorDataset:
    """The same rows everywhere."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(ROWS, 1, generator=generator))


def loader(batch_size: int = 4) -> DataLoader[Any]:
    """This rank's rows in their order; with a sampler of Lightning's own, training data are always shuffled."""
    rows = data()
    return DataLoader(rows, batch_size=batch_size, sampler=DistributedSampler(rows, shuffle=False))


class Regression(LightningModule):
    """Its training step calls parts of it, not the module."""

    def __init__(self, optimizer: str = "momentum") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1))
        self.kind = optimizer
        self.paused: list[bool] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)
        self.validated.append(flat(self))

    def configure_optimizers(self) -> Any:
        if self.kind == "none":
            return None
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        if self.kind == "qadam":
            return bagua.optim.QAdam(self.parameters(), lr=0.01, warmup_steps=3)
        if self.kind == "zero_one_adam":
            return bagua.optim.ZeroOneAdam(self.parameters(), lr=0.01, var_freeze_step=3, local_step_scaler=8)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Adversaries(LightningModule):
    """Two optimizers, stepped by hand; the second one only every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(WIDTH, 3), nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        one, two = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        one.zero_grad()
        self.manual_backward(F.mse_loss(self.second(self.first(batch[0])), batch[1]))
        one.step()
        if batch_idx % 2:
            two.zero_grad()
            self.manual_backward(self.second(self.first(batch[0]).detach()).square().mean())
            two.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.first, self.second)]


def flat(module: nn.Module) -> Tensor:
    """A copy of all parameters, end to end."""
    return torch.cat([param.detach().reshape(-1) for param in module.parameters()])


def trainer(
    algorithm: str | Algorithm = "gradient_allreduce",
    options: dict[str, Any] | None = None,
    devices: int = 2,
    num_nodes: int = 1,
    **kwargs: Any,
) -> Trainer:
    """A Trainer of this rank, within a process group that exists already."""
    strategy = BaguaStrategy(algorithm, cluster_environment=LightningEnvironment(), **(options or {}))
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", devices=devices, num_nodes=num_nodes, strategy=strategy, **{**settings, **kwargs})


def make(kind: str = "momentum", seed: int = 3) -> Regression:
    seed_everything(seed, verbose=False)
    return Regression(kind)


def saved(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)
