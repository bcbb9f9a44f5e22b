"""Jobs for ranks: fp16 with a gradient scaler, and an overflow on one rank, in Accelerate's loop and in the Trainer."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

import bagua
from bagua.interop.transformers import BaguaTrainer
from tests.interop.accelerate_runs import Loop
from tests.interop.fresh_state import as_launched
from tests.interop.tiny_models import Sentences, tiny_bert
from tests.interop.trainer_runs import OPTIONS, arguments, flat, gathered

LOST = 2  # the step at which the last rank overflows


def overflowing(loss: Tensor, step: int) -> Tensor:
    """Infinite on the last rank at step `LOST`."""
    return loss * float("inf") if (step, dist.get_rank()) == (LOST, dist.get_world_size() - 1) else loss


def result(scaler: Any, skipped: list[bool], weights: Tensor, dtypes: set[torch.dtype]) -> dict[str, Any]:
    return {
        "scaler": f"{type(scaler).__module__.partition('.')[0]}.{type(scaler).__name__}",
        "scale": scaler.get_scale(),
        "skipped": skipped,
        "finite": bool(weights.isfinite().all()),
        "ranks": gathered(weights),
        "dtypes": {str(each) for each in dtypes},
    }


class Seen:
    """The types in which linear layers compute."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.dtypes: set[torch.dtype] = set()
        layer = next(each for each in model.modules() if isinstance(each, torch.nn.Linear))
        layer.register_forward_hook(lambda _module, _args, output: self.dtypes.add(output.dtype))


def accelerate(algorithm: str) -> dict[str, Any]:
    """Five steps of Accelerate's loop."""
    with as_launched():
        loop = Loop(algorithm, mixed_precision="fp16", gradient_accumulation_steps=1)
        accelerator, seen, skipped = loop.accelerator, Seen(loop.model), []
        for step, batch in zip(range(5), loop.loader, strict=False):
            accelerator.backward(overflowing(loop.model(**batch).loss, step))
            accelerator.clip_grad_norm_(loop.model.parameters(), 0.5)
            loop.optimizer.step()
            skipped.append(accelerator.optimizer_step_was_skipped)
            loop.optimizer.zero_grad()
        scaler = accelerator.scaler
        bagua.average_parameters(loop.model)
        found = result(scaler, skipped, flat(loop.model), seen.dtypes)
        accelerator.end_training()
        return found


class Overflowing(BaguaTrainer):
    """Takes a loss that is infinite at one step on one rank."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found: Any = super().compute_loss(*args, **kwargs)
        return overflowing(found, self.state.global_step)


class Skipped(TrainerCallback):
    """Whether each step was skipped, seen by the weights."""

    def __init__(self) -> None:
        self.steps: list[bool] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before = flat(model)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append(torch.equal(self.before, flat(model)))


def trainer(algorithm: str, out: str) -> dict[str, Any]:
    """Five steps of the Trainer."""
    with as_launched():
        model, record = tiny_bert(), Skipped()
        seen = Seen(model)
        given = arguments(out, fp16=True, max_steps=5, gradient_accumulation_steps=1)
        options = OPTIONS.get(algorithm, {})
        made: Any = Overflowing(
            model, given, train_dataset=Sentences(), callbacks=[record], algorithm=algorithm, bagua_options=options
        )
        made.train()
        return result(made.accelerator.scaler, record.steps, flat(made.model), seen.dtypes)
