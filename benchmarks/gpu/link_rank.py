"""One rank of `link`: trains with each entrant, there and back through the list, and writes the times of its steps.

    python -m benchmarks.gpu.link_rank FOLDER [--dry]

Environment: as `bagua.bench.worker` has it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.bench import baselines
from bagua.bench.worker import await_file
from bagua.codecs import Eden, Sign

__all__ = ["ENTRANTS"]

_WARM_UP = 2  # steps
Ready = tuple[nn.Module, torch.optim.Optimizer, Callable[[], Any]]
Make = Callable[[nn.Module, torch.optim.Optimizer], Ready]


def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Ready:
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer, lambda: None


def _ddp_bf16(model: nn.Module, optimizer: torch.optim.Optimizer) -> Ready:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def half(state, bucket):  # no annotations: DDP compares them, and here they would be strings
        return default_hooks.bf16_compress_hook(state, bucket)

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, half)
    return wrapped, optimizer, lambda: None


def _ddp_power_sgd(model: nn.Module, optimizer: torch.optim.Optimizer) -> Ready:
    return baselines.with_power_sgd(model, 8, gradient_as_bucket_view=True), optimizer, lambda: None


def _bagua(algorithm: str, **options: Any) -> Make:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Ready:
        bagua.distribute(model, optimizer, algorithm, **options)
        return model, optimizer, lambda: bagua.detach(model)

    return make


ENTRANTS: dict[str, Make] = {
    "ddp": _ddp,
    "ddp bf16 hook": _ddp_bf16,
    "ddp PowerSGD hook, rank 8": _ddp_power_sgd,
    "bagua gradient_allreduce": _bagua("gradient_allreduce"),
    "bagua bytegrad": _bagua("bytegrad"),
    "bagua bytegrad, 1 bit": _bagua("bytegrad", codec=Sign(), error_feedback=True),
    "bagua bytegrad, eden": _bagua("bytegrad", codec=Eden()),
    "bagua bytegrad, eden, means in 2 bits": _bagua("bytegrad", codec=Eden(), gather_codec=Eden(bits=2)),
    "bagua bytegrad, eden, means in a trellis": _bagua("bytegrad", codec=Eden(), gather_codec=Eden(bits=2, states=8)),
    "bagua power_sgd, rank 8": _bagua("power_sgd", rank=8),
    "bagua decentralized": _bagua("decentralized"),
    "bagua low_precision_decentralized": _bagua("low_precision_decentralized"),
}


def main() -> None:
    """All entrants."""
    folder, dry = Path(sys.argv[1]), "--dry" in sys.argv
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    interface = os.environ["BAGUA_BENCH_INTERFACE"] or "lo"
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME=interface, GLOO_SOCKET_IFNAME=interface)
    device = torch.device("cpu" if dry else "cuda")
    if rank == 0:
        store = dist.TCPStore(os.environ["BAGUA_BENCH_ADDRESS"], 0, is_master=True, wait_for_workers=False)
        fresh = folder / "port.new"
        fresh.write_text(str(store.port))
        fresh.rename(folder / "port.json")
    else:
        store = dist.TCPStore(os.environ["BAGUA_BENCH_ADDRESS"], await_file(folder / "port.json", 60))
    bagua.init_process_group(store=store, rank=rank, world_size=size)
    times: dict[str, list[float]] = {name: [] for name in ENTRANTS}
    for name in [*ENTRANTS, *reversed(ENTRANTS)]:
        times[name] += _measure(ENTRANTS[name], device, 1 if dry else 3)
    (folder / f"rank-{rank}.json").write_text(json.dumps(times))
    bagua.destroy_process_group()


def _measure(make: Make, device: torch.device, steps: int) -> list[float]:
    torch.manual_seed(0)
    wide, deep = (1024, 12) if device.type == "cuda" else (32, 3)
    model: nn.Module = nn.Sequential(*[nn.Sequential(nn.Linear(wide, wide), nn.GELU()) for _ in range(deep)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, close = make(model, optimizer)
    x, found = torch.randn(32, wide, device=device), []
    for step in range(_WARM_UP + steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if step >= _WARM_UP:
            found.append(time.perf_counter() - began)
    close()
    return found


if __name__ == "__main__":
    main()
