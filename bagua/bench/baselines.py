"""Baselines: the systems that Bagua is compared with, each used as its documentation says."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua.bench.compute import EmulatedModel
from bagua.bench.training import Training, make_optimizer

__all__ = ["accelerate", "ddp", "ddp_bf16", "ddp_fp16", "ddp_power_sgd", "deepspeed", "horovod", "missing", "off"]
__all__ += ["post_local_sgd", "with_power_sgd"]

_POWER_RANK, _INTERVAL = 8, 8
_ONE_BUCKET_MB = 1 << 20


def missing(module: str) -> str:
    """Why a system cannot run: its package is not installed; empty if it is."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return "" if found else f"{module.partition('.')[0]} is not installed"


def off(model: EmulatedModel, optimizer: str = "sgd") -> Training:
    """No communication at all.

    Args:
        optimizer: as in `make_optimizer`; an Adam does its arithmetic.
    """
    return Training.of(model, make_optimizer(optimizer, model, emulated=False))


def ddp(model: EmulatedModel) -> Training:
    """torch's own; gradients are views of its buckets, which saves it a copy."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Training.of(wrapped, make_optimizer("sgd", model))


def ddp_fp16(model: EmulatedModel) -> Training:
    """DDP with the fp16 hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Training.of(wrapped, make_optimizer("sgd", model))


def ddp_bf16(model: EmulatedModel) -> Training:
    """DDP with the bf16 hook. DDP refuses that hook by its name outside of NCCL, hence one around it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def half(state, bucket):  # no annotations: DDP compares them, and here they would be strings
        return default_hooks.bf16_compress_hook(state, bucket)

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, half)
    return Training.of(wrapped, make_optimizer("sgd", model))


def ddp_power_sgd(model: EmulatedModel) -> Training:
    """DDP with the PowerSGD hook."""
    wrapped = with_power_sgd(model, _POWER_RANK, gradient_as_bucket_view=True)
    return Training.of(wrapped, make_optimizer("sgd", model))


def with_power_sgd(model: nn.Module, rank: int, **options: Any) -> DistributedDataParallel:
    """Return `model` under DDP with the PowerSGD hook, one bucket: with several it deadlocks on gloo.

    Args:
        model: with the same parameters on all ranks.
        rank: of the approximation.
        options: of DistributedDataParallel.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    wrapped = DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB, **options)
    state = hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, hook.powerSGD_hook)
    return wrapped


def post_local_sgd(model: EmulatedModel) -> Training:
    """torch's post-local SGD, its global phase over: one rank a subgroup, weights averaged at every 8th step."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    alone, _ = dist.new_subgroups(group_size=1)
    wrapped.register_comm_hook(hook.PostLocalSGDState(None, alone, start_localSGD_iter=1), hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=_INTERVAL, warmup_steps=1)
    inner = make_optimizer("sgd", model)
    return Training.of(wrapped, PostLocalSGDOptimizer(inner, averager))


def accelerate(model: EmulatedModel) -> Training:
    """Hugging Face Accelerate on CPU."""
    os.environ["ACCELERATE_USE_CPU"] = "1"
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, make_optimizer("sgd", model))
    training = Training.of(wrapped, optimizer)
    training.backward = accelerator.backward
    return training


def deepspeed(model: EmulatedModel) -> Training:
    """DeepSpeed without ZeRO."""
    import deepspeed as library  # pyright: ignore[reportMissingImports]

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    engine, *_ = library.initialize(model=model, optimizer=make_optimizer("sgd", model), config=config)
    x = torch.zeros(1)
    return Training(lambda: engine(x).sum(), engine.step, lambda: None, backward=engine.backward)


def horovod(model: EmulatedModel) -> Training:
    """Horovod over gloo."""
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    hvd.init()
    if hvd.size() != dist.get_world_size():
        raise RuntimeError(f"horovod found {hvd.size()} ranks of {dist.get_world_size()}; it needs its own launcher")
    optimizer = hvd.DistributedOptimizer(make_optimizer("sgd", model), model.named_parameters())
    return Training.of(model, optimizer)
