"""Trainings that are stopped and resumed; everything here must be importable by the rank processes."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import bagua
from bagua.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecisionDecentralized,
    OneBitLamb,
    PowerSGD,
    QAdam,
    SparseLoCo,
    Warmup,
    ZeroOneAdam,
)
from tests.engine.training import equal

Data = dict[str, Any]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def qadam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return bagua.optim.QAdam(params, lr=1e-2, warmup_steps=3)


def lamb(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return bagua.optim.OneBitLamb(params, lr=1e-2, warmup_steps=3)


def zero_one(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Local steps begin at the fourth step, in intervals of two and then of four."""
    return bagua.optim.ZeroOneAdam(params, lr=1e-2, var_freeze_step=2, local_step_scaler=2, local_step_clipper=4)


@dataclass(frozen=True)
class Case:
    """An algorithm, stopped after `stop` of `steps` steps."""

    algorithm: Any
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    stop: int = 5
    steps: int = 10


def cases() -> dict[str, Case]:
    """One for each registered algorithm, and those that keep more than usual from step to step."""
    fitting = {
        "qadam": Case(QAdam(), qadam),
        "one_bit_lamb": Case(OneBitLamb(codec="sign"), lamb),
        "zero_one_adam": Case(ZeroOneAdam(), zero_one, stop=7),
        "async": Case(AsyncModelAverage(sync_interval_ms=0)),
        "diloco": Case(DiLoCo(communication_interval=3)),
        "local_sgd": Case(LocalSGD(communication_interval=3)),
        "sparse_loco": Case(SparseLoCo(communication_interval=3)),
    }
    plain = {row.name: fitting.get(row.name, Case(row.name)) for row in bagua.algorithms.available(builtin_only=True)}
    return plain | {
        "feedback": Case(ByteGrad(codec="int4")),
        "feedback_sum": Case(ByteGrad(codec="sign", average=False)),
        "qadam_sign": Case(QAdam(codec="sign", error_feedback=True), qadam),
        "power_sgd_1": Case(PowerSGD(rank=1, min_compression=1.0)),
        "overlap": Case(LowPrecisionDecentralized(overlap=True)),
        "gossip": Case(Decentralized(topology="ring", communication_interval=2)),
        "delayed": Case(DiLoCo(communication_interval=4, delay=2, codec="int4", error_feedback=True)),
        "delayed_pending": Case(DiLoCo(communication_interval=4, delay=2, fragments=2), stop=6),
        "fragments_16_bit": Case(DiLoCo(communication_interval=2, codec="bf16", fragments=2)),
        "warmup_before": Case(Warmup(5, "gradient_allreduce", ByteGrad(codec="int4")), stop=3),
        "warmup_after": Case(Warmup(3, "gradient_allreduce", ByteGrad(codec="int4"))),
        "warmup_weights": Case(Warmup(3, "gradient_allreduce", LowPrecisionDecentralized(overlap=True))),
        "async_warming_up": Case(AsyncModelAverage(sync_interval_ms=0, warmup_steps=4), stop=2, steps=6),
    }


class Model(nn.Module):
    """Several buckets, a buffer that differs by rank, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.1
        self.first = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.inner = nn.Linear(40, 24)
        self.last = nn.Linear(24, 3)
        self.tied = nn.Linear(24, 3)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(torch.tanh(self.norm(self.first(x))))
        x = nn.functional.dropout(x, self.dropout, self.training)
        return self.last(x) + self.tied(x)


@dataclass
class Run:
    """A training."""

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    @classmethod
    def start(cls, case: Case, process_group: Any = None) -> Run:
        torch.manual_seed(7)
        model = Model()
        optimizer = case.optimizer(model.parameters())
        bagua.distribute(model, optimizer, case.algorithm, process_group=process_group, bucket_bytes=2000, num_lanes=2)
        return cls(case, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))

    def train(self, steps: Iterable[int], rank: int | None = None) -> None:
        who = dist.get_rank() if rank is None else rank
        for step in steps:
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * who + step))
            for index, half in enumerate(x.chunk(2)):
                with bagua.no_sync(self.model) if index == 0 else torch.enable_grad():
                    self.model(half).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=step % 2 == 0)
            self.scheduler.step()
            if isinstance(self.case.algorithm, AsyncModelAverage):
                time.sleep(0.005)

    @property
    def objects(self) -> Data:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def state(self) -> Data:
        """All there is."""
        states = {name: value.state_dict() for name, value in self.objects.items()}
        for group in states["optimizer"]["param_groups"]:
            group.pop("differentiable", None)  # torch adds it to an optimizer that has been loaded
        return {"algorithm": bagua.state_dict(self.model), "random": torch.get_rng_state(), **states}

    def settle(self) -> None:
        """A round in the background ends whenever it does; with bits in view, let there be none."""
        if isinstance(self.case.algorithm, AsyncModelAverage):
            bagua.pause(self.model)


def through_torch_save(run: Run, path: Path) -> Callable[[Run], None]:
    stream = io.BytesIO()
    torch.save(run.state(), stream)

    def load(fresh: Run) -> None:
        stream.seek(0)
        state = torch.load(stream, weights_only=True)
        for name, value in fresh.objects.items():
            value.load_state_dict(state[name])
        bagua.load_state_dict(fresh.model, state["algorithm"])
        torch.set_rng_state(state["random"])

    return load


def through_directory(run: Run, path: Path) -> Callable[[Run], None]:
    bagua.checkpoint.save(path / "directory", {**run.objects, "epoch": 3}, step=run.case.stop)

    def load(fresh: Run) -> None:
        loaded = bagua.checkpoint.load(path / "directory", fresh.objects)
        assert loaded is not None and (loaded.step, loaded.data) == (run.case.stop, {"epoch": 3})

    return load


def through_dcp(run: Run, path: Path) -> Callable[[Run], None]:
    dcp.save({"run": bagua.checkpoint.Shards({**run.objects, "epoch": 3})}, checkpoint_id=path / "dcp")

    def load(fresh: Run) -> None:
        shards = bagua.checkpoint.Shards(fresh.objects, reading=path / "dcp")
        dcp.load({"run": shards}, checkpoint_id=path / "dcp")
        assert shards.data == {"epoch": 3}

    return load


def through_original(run: Run, path: Path) -> Callable[[Run], None]:
    from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint

    random = torch.get_rng_state()
    save_checkpoint(run.case.stop, str(path / "original"), run.model, run.optimizer, run.scheduler)

    def load(fresh: Run) -> None:
        assert load_checkpoint(str(path / "original"), fresh.model, fresh.optimizer, fresh.scheduler) == run.case.stop
        assert torch.equal(torch.get_rng_state(), random)

    return load


WAYS = (through_torch_save, through_directory, through_dcp, through_original)


def resume(name: str, path: str, ways: Sequence[int] = range(len(WAYS))) -> tuple[list[str], bool]:
    """On a rank: train in one go, and stop and resume in each of `ways`.

    Returns:
        The ways that led elsewhere, and whether leaving out the algorithm's state would have.
    """
    case = cases()[name]
    whole = Run.start(case)
    whole.train(range(case.stop))
    whole.settle()
    loads = [WAYS[way](whole, Path(path)) for way in ways]
    half = {key: value for key, value in whole.state().items() if key != "algorithm"}
    half = torch.load(_saved(half), weights_only=True)
    whole.train(range(case.stop, case.steps))
    expected = torch.load(_saved(whole.state()), weights_only=True)
    bagua.detach(whole.model)
    different = []
    for way, load in zip(ways, loads, strict=True):
        fresh = Run.start(case)
        fresh.settle()
        torch.manual_seed(99)
        load(fresh)
        fresh.train(range(case.stop, case.steps))
        if not equal(fresh.state(), expected):
            different.append(WAYS[way].__name__)
        bagua.detach(fresh.model)
    without = Run.start(case)
    without.settle()
    for key, value in without.objects.items():
        value.load_state_dict(half[key])
    torch.set_rng_state(half["random"])
    without.train(range(case.stop, case.steps))
    matters = not equal(without.model.state_dict(), expected["model"])
    bagua.detach(without.model)
    return different, matters


def _saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
