"""Small trainings whose numbers depend on nothing but rank and step. Importable by rank processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bagua
from bagua.autotune import Settings, Tuner
from bagua.autotune.progress import Progress
from bagua.engine.engine import Engine
from bagua.engine.hooks import attachments

KIB, MIB = 2**10, 2**20
QUICK: dict[str, Any] = {"sampling_confidence_time_s": 0}
START = 256 * KIB  # bucket_bytes
WIDTH, DEPTH = 128, 16  # layers of 64 KiB, 1 MiB in all: enough to be cut into buckets, and those into pieces


def make_model(depth: int = DEPTH) -> nn.Module:
    """Without the global generator: ranks may be threads of one process."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 12)
    return model


class Training:
    """A distributed model that makes steps."""

    def __init__(
        self, team: Any, algorithm: Any = "gradient_allreduce", *, rank: int = 0, depth: int = DEPTH, **options: Any
    ) -> None:
        self.model = make_model(depth)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        bagua.distribute(self.model, self.optimizer, algorithm, process_group=team, **options)
        self.rank = team.rank if team is not None else rank
        self.made = 0

    def steps(self, count: int, passes: int = 1) -> Training:
        for _ in range(count):
            self.optimizer.zero_grad()
            for each in range(passes):
                generator = torch.Generator().manual_seed(10_000 * self.rank + 10 * self.made + each)
                x = torch.randn(4, WIDTH, generator=generator)
                if each < passes - 1:
                    with bagua.no_sync(self.model):
                        self.model(x).square().mean().backward()
                else:
                    self.model(x).square().mean().backward()
            self.optimizer.step()
            self.made += 1
        return self

    def until_tuned(self, most: int = 400) -> Training:
        while self.progress.phase not in ("done", "off"):
            assert self.made < most, self.progress
            self.steps(1)
        return self

    @property
    def progress(self) -> Progress:
        found = bagua.stats(self.model).tuning
        assert found is not None
        return found

    @property
    def weights(self) -> Tensor:
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])


def pretend(monkeypatch: Any, seconds: Callable[[Settings], float]) -> None:
    """Let steps seem to take `seconds(settings)`, whatever they take."""
    monkeypatch.setattr(Tuner, "_step_s", lambda self, outcome: seconds(self._active))


def engine_of(training: Training) -> Engine:
    return attachments[training.model].engine


def small_buckets_are_fast(settings: Settings) -> float:
    """For `pretend`."""
    return 0.1 + settings.bucket_bytes / MIB + settings.num_lanes / 100 + 0.01 * (settings.direct_bytes > 0)
