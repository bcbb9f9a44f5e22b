"""Jobs for ranks: moments of the Trainer besides steps: evaluation, saving, the end, wrong arguments."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

import bagua
from bagua.engine.hooks import attachments
from bagua.interop.transformers import BaguaTrainer
from tests.interop.fresh_state import as_launched
from tests.interop.tiny_models import Sentences, tiny_bert, tiny_llama
from tests.interop.trainer_runs import OPTIONS, Record, arguments, flat, gathered, heard, make


class Before(TrainerCallback):
    """The weights when a step has ended and an evaluation is due."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if control.should_evaluate:
            self.weights.append(flat(model))


def evaluate(out: str, algorithm: str) -> Any:
    """Evaluate twice in the course of a training."""
    with as_launched():
        record, before = Record(), Before()
        changes = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1}
        trainer = make(out, algorithm, record, **changes)
        trainer.add_callback(before)
        trainer.train()
        return {
            "before": [gathered(weights) for weights in before.weights],
            "during": [gathered(weights) for weights in record.during_evaluation],
            "losses": record.eval_losses,
            "at_end": gathered(flat(trainer.model)),
        }


def best(out: str, algorithm: str) -> Any:
    """Go back to the best checkpoint at the end; then predict, train once more, and save by hand."""
    with as_launched():
        record = Record()
        trainer = make(
            out,
            algorithm,
            record,
            save_strategy="steps",
            eval_strategy="steps",
            save_steps=2,
            eval_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            save_total_limit=1,
        )
        trainer.train()
        chosen = trainer.state.best_model_checkpoint
        loaded = AutoModelForSequenceClassification.from_pretrained(chosen)
        same = torch.allclose(flat(loaded), flat(trainer.model), rtol=1e-6, atol=1e-7)
        plain = not hasattr(trainer.model, "no_sync")
        predicted = len(trainer.predict(Sentences(8, seed=3)).predictions)
        steps = [trainer.bagua_stats.steps]
        trainer.train()
        steps.append(trainer.bagua_stats.steps)
        trainer.save_model(f"{out}/final")
        torch.distributed.barrier()
        final = AutoModelForSequenceClassification.from_pretrained(f"{out}/final")
        return {
            "same": same,
            "plain": plain,
            "predicted": predicted,
            "steps": steps,
            "final": torch.equal(flat(final), flat(trainer.model)),
            "ranks": gathered(flat(trainer.model)),
        }


def save_tied(out: str) -> Any:
    """A language model with tied weights, whose parameters are views of a bucket."""
    with as_launched():
        tokens = [{"input_ids": row, "labels": row} for row in Sentences(16).tokens]
        trainer = BaguaTrainer(
            tiny_llama(),
            arguments(out, max_steps=2, save_strategy="steps", save_steps=1, gradient_accumulation_steps=1),
            train_dataset=tokens,
            algorithm="local_sgd",
            bagua_options={"communication_interval": 100},
        )
        trainer.train()
        torch.distributed.barrier()
        half = AutoModelForCausalLM.from_pretrained(f"{out}/checkpoint-1")
        whole = AutoModelForCausalLM.from_pretrained(f"{out}/checkpoint-2")
        return {
            "moved": not torch.equal(flat(half), flat(whole)),
            "same": torch.allclose(flat(whole), flat(trainer.model)),
            "tied": whole.lm_head.weight is whole.model.embed_tokens.weight,
            "nbytes": os.path.getsize(f"{out}/checkpoint-2/model.safetensors"),
            "expected": 4 * flat(whole).numel(),
        }


def refused(out: str) -> dict[str, str]:
    """What is said of arguments that cannot work."""
    said: dict[str, str] = {}

    def attempt(name: str, **given: Any) -> None:
        try:
            with as_launched():
                changes = given.pop("changes", {})
                model = given.pop("model", None) or tiny_bert()
                BaguaTrainer(model, arguments(out, **changes), train_dataset=Sentences(), **given)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        else:
            said[name] = ""
        for variable in [name for name in os.environ if name.startswith(("ACCELERATE_USE_", "FSDP_"))]:
            del os.environ[variable]  # Accelerate notes its plugins there

    attempt("wrapped", model=DistributedDataParallel(tiny_bert()))
    attempt("option", bagua_options={"codex": "int4"})
    attempt("algorithm", algorithm="bytegrap")
    attempt("group", bagua_options={"process_group": None})
    attempt("tolerant", bagua_options={"fault_tolerant": True})
    attempt("fsdp", changes={"fsdp": "full_shard"})
    attempt("cpu", changes={"use_cpu": False})
    return said


def optimizer_missing(out: str) -> str:
    """An algorithm that needs an optimizer of its own, with the Trainer's; the Trainer can be used afterwards."""
    with as_launched():
        trainer = BaguaTrainer(tiny_bert(), arguments(out), train_dataset=Sentences(), algorithm="qadam")
        try:
            trainer.train()
        except ValueError as error:
            return str(error)
        return ""


def callback_fails(out: str) -> Any:
    """An exception ends a training; the same Trainer begins another one."""

    class Fail(TrainerCallback):
        armed = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.armed and state.global_step == 2:
                raise KeyError("a user's mistake")

    with as_launched():
        trainer = make(out, "local_sgd", Record())
        fail = Fail()
        trainer.add_callback(fail)
        try:
            trainer.train()
        except KeyError:
            fail.armed = False
        trainer.train()
        return {"armed": fail.armed, "steps": trainer.bagua_stats.steps, "ranks": gathered(flat(trainer.model))}


def compiled(out: str) -> Any:
    """With torch.compile, as TrainingArguments ask for it."""
    with as_launched(), heard() as messages:
        record = Record()
        changes = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3}
        trainer = make(out, "gradient_allreduce", record, OPTIONS.get("gradient_allreduce"), **changes)
        trainer.train()
        return {
            "losses": record.losses,
            "norms": record.norms,
            "kind": type(trainer.model_wrapped).__name__,
            "steps": trainer.bagua_stats.steps,
            "bytes": trainer.bagua_stats.total.bytes_sent,
            "messages": messages,
            "plain": isinstance(trainer.model, nn.Module) and not hasattr(trainer.model, "no_sync"),
            "distributed": trainer.model_wrapped in attachments,
        }


def reports_metrics(out: str) -> Any:
    """A callback begins a report when training begins; the end of training ends it."""
    seen: list[tuple[int, int]] = []

    class Reports(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            bagua.metrics.report(model, lambda stats: seen.append((stats.steps, stats.rank)), every=2, ranks="all")

    with as_launched():
        trainer = make(out, "bytegrad", Record(), max_steps=5)
        trainer.add_callback(Reports())
        trainer.train()
        return seen
