"""Part 9: exchanges beside the backward pass, seen in a trace; and what the engine costs beside DDP on one GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import bagua
from benchmarks.gpu import mirror
from benchmarks.gpu.clock import pairs
from benchmarks.gpu.nccl import inline_if_dry
from benchmarks.gpu.record import Record, Skip
from benchmarks.gpu.trace import overlap_us, read, spans_by_stream

__all__ = ["run"]

Step = Callable[[], Any]


def run(record: Record) -> None:
    """Traces of a mirrored team (see `mirror`), then step times in turn with DDP."""
    on_gpu = torch.cuda.is_available() and not record.dry
    device = torch.device("cuda" if on_gpu else "cpu")
    mine = not torch.distributed.is_initialized()
    bagua.init_process_group()
    try:
        for algorithm in ("gradient_allreduce", "bytegrad"):
            with record.check(f"{algorithm}: exchanges run on another stream, beside the backward pass"):
                _traced(record, algorithm, device, on_gpu)
        for name, make in {
            "bagua, one rank": lambda: _step(device, on_gpu, "gradient_allreduce", mirrored=False),
            "bagua, mirrored team of two": lambda: _step(device, on_gpu, "gradient_allreduce", mirrored=True),
            "bagua bytegrad, mirrored team of two": lambda: _step(device, on_gpu, "bytegrad", mirrored=True),
        }.items():
            with record.check(f"step time beside DDP of one rank: {name}"):
                _beside_ddp(record, name, make, device, on_gpu)
    finally:
        if mine:
            bagua.destroy_process_group()


def _model(device: torch.device, on_gpu: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    wide, deep, batch = (2048, 24, 1024) if on_gpu else (16, 3, 4)  # 100 M parameters
    layers = [nn.Sequential(nn.Linear(wide, wide), nn.GELU()) for _ in range(deep)]
    return nn.Sequential(*layers).to(device), torch.randn(batch, wide, device=device)


def _step(device: torch.device, on_gpu: bool, algorithm: str | None, mirrored: bool) -> Step:
    model, x = _model(device, on_gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if algorithm is None:
        model = DistributedDataParallel(model, device_ids=[0] if on_gpu else None)
    else:
        with inline_if_dry(not on_gpu and mirrored):
            team = mirror.MirrorTeam(mirror.nccl if on_gpu else mirror.gloo) if mirrored else None
            bagua.distribute(model, optimizer, algorithm, process_group=team)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def _traced(record: Record, algorithm: str, device: torch.device, on_gpu: bool) -> None:
    step = _step(device, on_gpu, algorithm, mirrored=True)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds, acc_events=True) as prof:
        for _ in range(3):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    labels = [event.key for event in prof.key_averages() if "bagua::" in event.key]
    assert labels, "no range of the library's in the trace"
    if not on_gpu:
        raise Skip(f"dry run: {len(labels)} ranges seen, no streams")
    folder = record.path.parent if record.path is not None else Path()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trace-{algorithm}.json.gz"
    prof.export_chrome_trace(str(path))
    streams = spans_by_stream(read(path))
    assert len(streams) > 1, f"all work ran on one stream: {list(streams)}"
    busy = {stream: overlap_us(*[[span for span, _ in found]] * 2) for stream, found in streams.items()}
    main = max(busy, key=lambda stream: busy[stream])
    beside = 0.0
    for stream, found in sorted(streams.items()):
        spans = [span for span, _ in found]
        shared = overlap_us(spans, [span for span, _ in streams[main]]) if stream != main else 0.0
        beside += shared
        record.row(
            algorithm=algorithm,
            stream=stream,
            kind="passes" if stream == main else "exchanges",
            operations=len(found),
            busy_us=round(busy[stream]),
            beside_passes_us=round(shared),
            names=sorted({name[:60] for _, name in found})[:6],
        )
    assert beside > 0, "nothing ran beside the passes"


def _beside_ddp(record: Record, name: str, make: Callable[[], Step], device: torch.device, on_gpu: bool) -> None:
    measured = pairs(_step(device, on_gpu, None, False), make(), 25 if on_gpu else 2, 4 if on_gpu else 1, device)
    record.row(
        entrant=name,
        ddp_ms=round(statistics.median(a for a, _ in measured) * 1e3, 3),
        own_ms=round(statistics.median(b for _, b in measured) * 1e3, 3),
        ratio=round(statistics.median(b / a for a, b in measured), 4),
    )
