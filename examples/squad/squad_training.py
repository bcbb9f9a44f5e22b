"""Steps, epochs and checkpoints."""

from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from squad_windows import Batch, Encoder, Window, collate
from torch import Tensor, nn
from torch.nn import functional as F

import bagua

__all__ = ["train"]

PROFILED = 10  # steps


def train(
    args: Namespace,
    model: nn.Module,
    encoder: Encoder,
    windows: Sequence[Window],
    device: torch.device,
    evaluate: Callable[[], dict[str, float]],
) -> None:
    """Train `model` on all ranks; at the end all of them hold the same weights. Collective."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    passes = len(windows) // (size * args.per_gpu_train_batch_size)  # of an epoch
    steps_per_epoch = passes // args.gradient_accumulation_steps
    if steps_per_epoch == 0:
        raise SystemExit(f"{len(windows)} windows do not make one step of {size} ranks; use smaller batches")
    epochs = math.ceil(args.max_steps / steps_per_epoch) if args.max_steps > 0 else math.ceil(args.num_train_epochs)
    total = args.max_steps if args.max_steps > 0 else int(steps_per_epoch * args.num_train_epochs)
    optimizer = make_optimizer(args, model, total)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, args.warmup_steps, total))
    scaler = bagua.GradScaler(device.type, enabled=args.fp16 and device.type == "cuda")
    options = {}
    if args.algorithm == "async":
        options = {"sync_interval_ms": args.async_sync_interval, "warmup_steps": args.async_warmup_steps}
    bagua.distribute(model, optimizer, args.algorithm, **options)
    torch.manual_seed(args.seed + 1000 * (rank + 1))  # every rank drops other units

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    folder = args.output_dir / "checkpoints"
    found = bagua.checkpoint.load(folder, state) if args.resume else None
    done = found.step if found is not None else 0
    _say(f"{total} steps, {epochs} epochs of {len(windows)} windows, {size * args.per_gpu_train_batch_size} a pass"
         + (f"; goes on after step {done}" if done else ""))  # fmt: skip
    model.train()
    started, recent = time.perf_counter(), []
    batches = _batches(args, windows, encoder, device, done, steps_per_epoch)
    profiler = None
    for step in range(done + 1, total + 1):
        if step == args.prof:
            profiler = torch.profiler.profile()
            profiler.start()
        recent.append(_step(args, model, optimizer, scaler, batches, device))
        scheduler.step()
        if rank == 0 and sys.stdout.isatty():
            print(f"\rstep {step}/{total} ", end="", flush=True)
        if step % args.logging_steps == 0 or step == total:
            loss, recent = _mean(torch.stack(recent).mean()), []
            scores = evaluate() if args.evaluate_during_training else {}
            more = "".join(f"  {key} {value:.1f}" for key, value in scores.items() if key != "total")
            _say(f"step {step}/{total}  loss {loss:.4f}  {time.perf_counter() - started:.0f} s{more}")
        if args.save_steps > 0 and (step % args.save_steps == 0 or step == total):
            bagua.checkpoint.save(folder, state, step=step, keep=2)
            if args.eval_all_checkpoints:
                scores = evaluate()
                _say(f"checkpoint {step}: exact {scores['exact']:.1f}  f1 {scores['f1']:.1f}")
        if profiler is not None and step == args.prof + PROFILED - 1:
            profiler.stop()
            _say(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
            break
    stats = bagua.stats(model)
    bagua.average_parameters(model)
    if stats.steps:
        _say(f"{stats.algorithm}: {stats.total.bytes_sent / stats.steps / 1e6:.3f} MB sent per step and rank, "
             f"compression {stats.total.compression_ratio:.2f}")  # fmt: skip
    bagua.detach(model)


def make_optimizer(args: Namespace, model: nn.Module, steps: int) -> torch.optim.Optimizer:
    """AdamW, or what belongs to the algorithm; no weight decay for biases and norms."""
    matrices = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    decay = args.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
    exact = max(1, steps // 4)  # steps in which momenta travel in full precision
    lr = args.learning_rate
    if args.algorithm == "qadam":
        return bagua.optim.QAdam(groups, lr=lr, warmup_steps=exact, eps=args.adam_epsilon)
    if args.algorithm == "one_bit_lamb":
        return bagua.optim.OneBitLamb(groups, lr=3 * lr, warmup_steps=exact)
    if args.algorithm == "zero_one_adam":
        return bagua.optim.ZeroOneAdam(groups, lr=lr, var_freeze_step=exact, eps=args.adam_epsilon)
    optimizer = torch.optim.AdamW(groups, lr=lr, eps=args.adam_epsilon)
    return bagua.optim.fuse(optimizer) if args.fuse_optimizer else optimizer


def _rate(step: int, warmup: int, total: int) -> float:
    """Up in a straight line, then down in another one to zero."""
    return min((step + 1) / warmup if warmup else 1.0, max(0.0, (total - step) / max(1, total - warmup)))


def _batches(
    args: Namespace, windows: Sequence[Window], encoder: Encoder, device: torch.device, done: int, steps_per_epoch: int
) -> Iterator[Batch]:
    """This rank's batches from step `done` + 1 on, without an end; the same after a restart."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    each, passes = args.per_gpu_train_batch_size, args.gradient_accumulation_steps
    epoch, first = done // steps_per_epoch, done % steps_per_epoch * passes
    while True:
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(args.seed + epoch)).tolist()
        for number in range(first, steps_per_epoch * passes):
            begin = (number * size + rank) * each
            batch = collate([windows[index] for index in order[begin : begin + each]], encoder.pad_id)
            yield Batch(*(tensor.to(device) for tensor in batch))
        epoch, first = epoch + 1, 0


def _step(
    args: Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: bagua.GradScaler,
    batches: Iterator[Batch],
    device: torch.device,
) -> Tensor:
    """One step of several passes; returns this rank's mean loss."""
    losses = []
    for number in range(args.gradient_accumulation_steps):
        batch = next(batches)
        dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        with torch.autocast(device.type, dtype, enabled=args.fp16):
            starts, ends = model(batch.tokens, batch.types, batch.mask)
        loss = (_cross_entropy(starts, batch.starts, batch.mask) + _cross_entropy(ends, batch.ends, batch.mask)) / 2
        scaled = scaler.scale(loss / args.gradient_accumulation_steps)
        if number + 1 < args.gradient_accumulation_steps:
            with bagua.no_sync(model):  # the last pass synchronises the sum
                scaled.backward()
        else:
            scaled.backward()
        losses.append(loss.detach())
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return torch.stack(losses).mean()


def _cross_entropy(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Of one token of each sequence, among those that are no padding."""
    return F.cross_entropy(logits.float().masked_fill(~mask, -1e30), target)


def _mean(value: Tensor) -> float:
    total = value.double().cpu()
    torch.distributed.all_reduce(total)
    return total.item() / torch.distributed.get_world_size()


def _say(text: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(("\r" if sys.stdout.isatty() else "") + text, flush=True)
