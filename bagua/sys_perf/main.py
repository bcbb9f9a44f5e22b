"""`bagua_sys_perf`: samples per second of VGG-16, ResNet-50, BERT-Large and others on synthetic data.

    bagua run --nproc-per-node 2 --no-python bagua_sys_perf --model vgg16 --algorithm bytegrad
    bagua_sys_perf --model resnet50 --scale 0.25 --image-size 64                          one rank, on a CPU in a minute

Differs: from Bagua 0.9, it runs on CPUs too, sums the rates of all ranks instead of multiplying that of rank 0, and
its --fp16-allreduce has an effect.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import bagua
from bagua.sys_perf.arguments import algorithm_options, get_args_parser, parse
from bagua.sys_perf.catalogue import Choice, choose
from bagua.sys_perf.rates import gather_rates, interval
from bagua.sys_perf.workload import Workload, make_workload

__all__ = ["main"]

LEARNING_RATE = 0.01


def main(argv: Sequence[str] | None = None, prog: str = "bagua_sys_perf") -> int:
    """Measure, and print on rank 0.

    Returns:
        0; wrong arguments end the program with 2.
    """
    parser = get_args_parser(prog)
    args = parse(parser, None if argv is None else list(argv))
    try:
        choice = choose(args.model, args.source, args.scale)
    except ValueError as error:
        parser.error(str(error))
    deterministic = torch.are_deterministic_algorithms_enabled()
    if args.deterministic:
        _be_deterministic()
    try:
        device = _device(args.no_cuda)
        bagua.init_process_group()
        result = _benchmark(args, choice, device)
        if torch.distributed.get_rank() == 0 and args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=2) + "\n")
        bagua.destroy_process_group()
    finally:
        torch.use_deterministic_algorithms(deterministic)
    return 0


def _benchmark(args: Namespace, choice: Choice, device: torch.device) -> dict[str, Any]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(rank)
    workload = make_workload(choice, args.batch_size, args.image_size, args.seq_length, device, seed=rank)
    optimizer = _optimizer(args, workload.model, size)
    bagua.distribute(
        workload.model, optimizer, args.algorithm, bucket_bytes=args.bucket_bytes, **algorithm_options(args)
    )
    kind = "GPU" if device.type == "cuda" else "CPU"
    _introduce(args, choice, workload, kind, size)
    result = _measure(args, workload, _stepper(args, workload, optimizer, device), device, kind)
    return {"model": choice.name, "source": choice.source, **result}


def _device(no_cuda: bool) -> torch.device:
    if no_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= gpus:
        raise SystemExit(f"local rank {local_rank} has no GPU ({gpus} found); pass --no-cuda to run on the CPU")
    torch.cuda.set_device(local_rank)
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    return torch.device("cuda", local_rank)


def _be_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts; it refuses without
    torch.use_deterministic_algorithms(True)


def _optimizer(args: Namespace, model: nn.Module, size: int) -> torch.optim.Optimizer:
    """SGD, or the optimizer that belongs to the algorithm; its exact steps are over when the measurement begins."""
    exact = max(1, args.num_warmup_batches - 1)
    params = list(model.parameters())
    if args.algorithm == "qadam":
        return bagua.optim.QAdam(params, warmup_steps=exact)
    if args.algorithm == "one_bit_lamb":
        return bagua.optim.OneBitLamb(params, warmup_steps=exact)
    if args.algorithm == "zero_one_adam":
        return bagua.optim.ZeroOneAdam(params, var_freeze_step=exact)
    optimizer = torch.optim.SGD(params, lr=LEARNING_RATE * (1 if args.use_adasum else size))
    if args.use_adasum and torch.distributed.get_rank() == 0:
        print("--use-adasum: Adasum is not supported; gradients are averaged", file=sys.stderr)
    return bagua.optim.fuse(optimizer) if args.fuse_optimizer else optimizer


def _stepper(
    args: Namespace, workload: Workload, optimizer: torch.optim.Optimizer, device: torch.device
) -> Callable[[], Tensor]:
    scaler = bagua.GradScaler(device.type, enabled=args.amp and device.type == "cuda")
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16

    def step() -> Tensor:
        with torch.autocast(device.type, dtype, enabled=args.amp):
            loss = workload.loss()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _introduce(args: Namespace, choice: Choice, workload: Workload, kind: str, size: int) -> None:
    definition = "own definition" if choice.source == "own" else f"definition of {choice.source}"
    scale = f" at scale {args.scale:g}" if args.scale != 1 else ""
    _say(f"Model: {choice.name}{scale}, {workload.num_parameters:,} parameters, {definition}; {workload.description}")
    _say(f"Algorithm: {bagua.stats(workload.model).algorithm}")
    _say(f"Batch size: {args.batch_size}")
    _say(f"Number of {kind}s: {size}" + (f", {torch.get_num_threads()} threads each" if kind == "CPU" else ""))


def _measure(
    args: Namespace, workload: Workload, step: Callable[[], Tensor], device: torch.device, kind: str
) -> dict[str, Any]:
    size = torch.distributed.get_world_size()
    _say("Running warmup...")
    loss = _run(step, args.num_warmup_batches, device, "warmup")
    _say("Running benchmark...")
    rates: list[float] = []
    for number in range(args.num_iters):
        started = time.perf_counter()
        loss = _run(step, args.num_batches_per_iter, device, f"Iter #{number}")
        rates.append(args.batch_size * args.num_batches_per_iter / (time.perf_counter() - started))
        _say(f"Iter #{number}: {rates[-1] * size:.1f} {workload.unit}/sec {kind}")
    table = gather_rates(rates)
    per_rank, total = [interval(row) for row in table], interval(table.sum(0))
    mean = interval(table.mean(0))
    _say(f"{workload.unit.capitalize()}/sec per {kind}: {mean}")
    if size > 1:
        _say("\n".join(f"  rank {rank}: {each}" for rank, each in enumerate(per_rank)))
    _say(f"Total {workload.unit}/sec on {size} {kind}(s): {total}")
    assert loss is not None
    final = loss.double()
    torch.distributed.all_reduce(final)
    sent = bagua.stats(workload.model)
    per_step_mb, exposed_ms = sent.total.bytes_sent / sent.steps / 1e6, sent.total.exposed_s / sent.steps * 1e3
    _say(f"{per_step_mb:.3f} MB sent and {exposed_ms:.1f} ms waited per step on rank 0")
    _say(f"Final loss: {final.item() / size:.9f}")
    return {
        "parameters": workload.num_parameters,
        "algorithm": sent.algorithm,
        "ranks": size,
        "device": device.type,
        "batch_size": args.batch_size,
        "unit": workload.unit,
        "per_rank": [each._asdict() for each in per_rank],
        "total": total._asdict(),
        "mb_sent_per_step": per_step_mb,
        "exposed_ms_per_step": exposed_ms,
        "final_loss": final.item() / size,
    }


def _run(step: Callable[[], Tensor], count: int, device: torch.device, what: str) -> Tensor | None:
    """Make so many steps and wait for them; return the last one's loss. Progress goes to a terminal only."""
    loss = None
    shows = sys.stdout.isatty() and torch.distributed.get_rank() == 0
    for number in range(count):
        loss = step()
        if shows:
            print(f"\r{what}: step {number + 1}/{count} ", end="", flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if shows:
        print("\r\033[K", end="")
    return loss


def _say(text: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
