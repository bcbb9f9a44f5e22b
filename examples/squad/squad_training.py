"""The Trainer: its arguments, the optimizer that belongs to the algorithm, and moments of the training."""

# pyright: reportMissingImports=false
from __future__ import annotations

import math
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from squad_answers import Scorer
from squad_windows import Window
from transformers import DataCollatorWithPadding, TrainerCallback, TrainingArguments

import bagua
from bagua.interop.transformers import BaguaTrainer

__all__ = ["last_checkpoint", "make_arguments", "make_trainer", "train"]

PROFILED = 10  # steps


def make_arguments(args: Namespace) -> TrainingArguments:
    """Return what the flags mean to the Trainer."""
    on_cpu = args.no_cuda or not torch.cuda.is_available()
    own = args.model_name_or_path is None
    return TrainingArguments(
        output_dir=str(args.output_dir),
        use_cpu=on_cpu,
        seed=args.seed,
        per_device_train_batch_size=args.per_gpu_train_batch_size,
        per_device_eval_batch_size=args.per_gpu_eval_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        learning_rate=args.learning_rate or (1e-3 if own else 5e-5),
        weight_decay=args.weight_decay,
        adam_epsilon=args.adam_epsilon,
        max_grad_norm=args.max_grad_norm,
        num_train_epochs=args.num_train_epochs or (40.0 if own else 3.0),
        max_steps=args.max_steps,
        warmup_steps=args.warmup_steps,
        fp16=args.fp16 and not on_cpu,
        bf16=args.fp16 and on_cpu,
        logging_steps=args.logging_steps,
        save_strategy="steps" if args.save_steps > 0 else "no",
        save_steps=max(1, args.save_steps),
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
    )


def make_trainer(
    args: Namespace,
    arguments: TrainingArguments,
    model: Any,
    tokenizer: Any,
    learned: Sequence[Window],
    shown: Sequence[Window],
    scorer: Scorer,
) -> Any:
    """Return a Trainer that learns from the windows `learned`, if there are any, and is evaluated on `shown`."""
    options = {}
    if args.algorithm == "async":
        options = {"sync_interval_ms": args.async_sync_interval, "warmup_steps": args.async_warmup_steps}
    return BaguaTrainer(
        model,
        arguments,
        train_dataset=[window.inputs for window in learned],
        eval_dataset=[window.inputs for window in shown],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=scorer,
        optimizers=(_make_optimizer(args, arguments, model, len(learned)) if learned else None, None),
        callbacks=[Moments(args)],
        algorithm=args.algorithm,
        bagua_options=options,
    )


def last_checkpoint(directory: Path) -> str | None:
    """Return the newest complete checkpoint in `directory`: the Trainer writes its state last."""
    found = [path.parent for path in directory.glob("checkpoint-*/trainer_state.json")]
    return str(max(found, key=_step_of)) if found else None


def train(args: Namespace, trainer: Any, last: str | None) -> None:
    """Train, from the checkpoint `last` if there is one, and save the model on rank 0. Collective.

    All ranks then hold the same weights.
    """
    with trainer.args.main_process_first():
        if last is None and trainer.args.should_save:  # a later --resume must not find those of another run
            for old in args.output_dir.glob("checkpoint-*"):
                shutil.rmtree(old)
    if last is not None and trainer.is_world_process_zero():
        print(f"goes on from {last}", flush=True)
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    stats = trainer.bagua_stats
    steps = stats.steps - (0 if last is None else _step_of(Path(last)))  # of this run
    if steps and trainer.is_world_process_zero():
        print(f"{args.algorithm}: {stats.total.bytes_sent / steps / 1e6:.3f} MB sent per step and rank, "
              f"compression {stats.total.compression_ratio:.2f}", flush=True)  # fmt: skip


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _make_optimizer(args: Namespace, arguments: TrainingArguments, model: Any, windows: int) -> torch.optim.Optimizer:
    """AdamW, or what belongs to the algorithm; no weight decay for biases and norms."""
    groups: list[dict[str, Any]] = [
        {"params": [param for param in model.parameters() if param.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [param for param in model.parameters() if param.ndim <= 1], "weight_decay": 0.0},
    ]
    batches = math.ceil(windows / (arguments.world_size * arguments.per_device_train_batch_size))
    steps_per_epoch = math.ceil(batches / arguments.gradient_accumulation_steps)
    steps = arguments.max_steps if arguments.max_steps > 0 else arguments.num_train_epochs * steps_per_epoch
    exact = max(1, int(steps) // 4)  # steps in which momenta travel in full precision
    lr, eps = arguments.learning_rate, args.adam_epsilon
    if args.algorithm == "qadam":
        return bagua.optim.QAdam(groups, lr=lr, warmup_steps=exact, eps=eps)
    if args.algorithm == "one_bit_lamb":
        return bagua.optim.OneBitLamb(groups, lr=3 * lr, warmup_steps=exact)
    if args.algorithm == "zero_one_adam":
        return bagua.optim.ZeroOneAdam(groups, lr=lr, var_freeze_step=exact, eps=eps)
    optimizer = torch.optim.AdamW(groups, lr=lr, eps=eps)
    return bagua.optim.fuse(optimizer) if args.fuse_optimizer else optimizer


class Moments(TrainerCallback):
    """Evaluates during the training, and profiles, as the flags say.

    Args:
        args: of the command line.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._profiler: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to profile at the step that was named."""
        if state.global_step + 1 == self._args.prof:
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for an evaluation; end the training with a profile."""
        logged = self._args.evaluate_during_training and state.global_step % args.logging_steps == 0
        saved = self._args.eval_all_checkpoints and control.should_save
        control.should_evaluate = logged or saved
        if self._profiler is not None and state.global_step == self._args.prof + PROFILED - 1:
            self._profiler.stop()
            control.should_training_stop = True
            if state.is_world_process_zero:
                print(self._profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20), flush=True)
