"""Jobs for ranks: the Trainer, with Bagua or with DDP."""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import bagua
from bagua.interop.transformers import BaguaTrainer
from tests.interop.fresh_state import as_launched
from tests.interop.tiny_models import Sentences, tiny_bert

STEPS = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "async": {"sync_interval_ms": 0},
    "diloco": {"communication_interval": 2},
    "local_sgd": {"communication_interval": 2},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "qadam": lambda params: bagua.optim.QAdam(params, lr=0.01, warmup_steps=3),
    "one_bit_lamb": lambda params: bagua.optim.OneBitLamb(params, lr=0.002, warmup_steps=3),
    "zero_one_adam": lambda params: bagua.optim.ZeroOneAdam(
        params, lr=0.01, var_freeze_step=3, local_step_scaler=2, local_step_clipper=2
    ),
}


class Record(TrainerCallback):
    """Losses and norms by step, and what the model is at moments of the training."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.norms: dict[int, float] = {}
        self.eval_losses: dict[int, float] = {}
        self.during_evaluation: list[Tensor] = []
        self.trained: nn.Module | None = None
        self.module: nn.Module | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.module = model

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]
            self.norms[state.global_step] = logs.get("grad_norm", 0.0)  # an old Trainer logs it if it clips
        if "eval_loss" in logs:
            self.eval_losses[state.global_step] = logs["eval_loss"]

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.module is not None:
            self.during_evaluation.append(flat(self.module))


def flat(module: nn.Module) -> Tensor:
    """All parameters in one tensor."""
    return torch.cat([param.detach().reshape(-1) for param in module.parameters()])


def arguments(out: str, **changes: Any) -> TrainingArguments:
    """Six steps of two batches each, clipped, on CPUs."""
    defaults: dict[str, Any] = {
        "output_dir": out,
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
    }
    return TrainingArguments(**{**defaults, **changes})


def make(
    out: str,
    algorithm: str | None,
    record: Record,
    options: dict[str, Any] | None = None,
    model: nn.Module | None = None,
    **changes: Any,
) -> Any:
    """A Trainer; torch's DDP without an `algorithm`."""
    module = tiny_bert() if model is None else model
    given: dict[str, Any] = {}
    if algorithm in OPTIMIZERS:
        given["optimizers"] = (OPTIMIZERS[algorithm](module.parameters()), None)
    if algorithm is not None:
        given |= {"algorithm": algorithm, "bagua_options": {**OPTIONS.get(algorithm, {}), **(options or {})}}
    kind = Trainer if algorithm is None else BaguaTrainer
    data = Sentences()
    return kind(
        module,
        arguments(out, **changes),
        train_dataset=data,
        eval_dataset=Sentences(16, seed=2),
        callbacks=[record],
        **given,
    )


def train(out: str, algorithm: str | None, changes: dict[str, Any], options: dict[str, Any] | None = None) -> Any:
    """Train; returns what happened."""
    with as_launched():
        record = Record()
        trainer = make(out, algorithm, record, options, **changes)
        result = trainer.train()
        stats = trainer.bagua_stats if algorithm is not None else None
        weights = flat(trainer.model)
        return {
            "losses": record.losses,
            "norms": record.norms,
            "eval_losses": record.eval_losses,
            "train_loss": result.training_loss,
            "wrapped": type(trainer.model_wrapped).__name__,
            "weights": weights,
            "bytes": 0 if stats is None else stats.total.bytes_sent,
            "steps": 0 if stats is None else stats.steps,
            "params": weights.numel(),
        }


def resume(out: str, algorithm: str, changes: dict[str, Any], options: dict[str, Any] | None = None) -> Any:
    """Train to the end with a checkpoint at half of it; then from there, in new objects. Returns both losses."""
    with as_launched():
        through, again = Record(), Record()
        make(out, algorithm, through, options, save_strategy="steps", save_steps=3, **changes).train()
        trainer = make(out, algorithm, again, options, model=tiny_bert(seed=5), **changes)
        trainer.train(resume_from_checkpoint=f"{out}/checkpoint-3")
        return {
            "through": {step: through.losses[step] for step in range(4, STEPS + 1)},
            "again": again.losses,
            "weights": flat(trainer.model),
        }


def save_half(out: str, algorithm: str, options: dict[str, Any]) -> Tensor:
    """Train with a checkpoint at half of it; returns the weights that it holds."""
    with as_launched():
        trainer = make(out, algorithm, Record(), options, save_strategy="steps", save_steps=3, max_steps=3)
        trainer.train()
        return flat(trainer.model)


def go_on(out: str, algorithm: str, options: dict[str, Any]) -> Any:
    """Go on from there, perhaps on another number of ranks."""

    class First(TrainerCallback):
        weights: Tensor | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if self.weights is None:
                self.weights = flat(model)

    with as_launched(), heard() as messages:
        record, first = Record(), First()
        trainer = make(out, algorithm, record, options)
        trainer.add_callback(first)
        trainer.train(resume_from_checkpoint=f"{out}/checkpoint-3")
        finite = all(map(math.isfinite, record.losses.values()))
        return {
            "finite": finite,
            "first": first.weights,
            "steps": trainer.bagua_stats.steps,
            "ranks": gathered(flat(trainer.model)),
            "messages": messages,
        }


def resume_from(out: str, saved_with: str | None, algorithm: str) -> Any:
    """Save with one algorithm (None: DDP), go on with another; returns warnings and finite losses."""
    with as_launched(), heard() as messages:
        make(out, saved_with, Record(), save_strategy="steps", save_steps=3, max_steps=3).train()
        record = Record()
        make(out, algorithm, record).train(resume_from_checkpoint=f"{out}/checkpoint-3")
        return {
            "messages": messages,
            "finite": all(map(math.isfinite, record.losses.values())),
            "losses": record.losses,
        }


def gathered(tensor: Tensor) -> list[Tensor]:
    """Every rank's, by rank."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


class heard(AbstractContextManager[list[str]]):
    """What the logger "bagua" says within it."""

    def __enter__(self) -> list[str]:
        self._messages: list[str] = []
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self._messages.append(record.getMessage())
        logging.getLogger("bagua").addHandler(self._handler)
        return self._messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("bagua").removeHandler(self._handler)
