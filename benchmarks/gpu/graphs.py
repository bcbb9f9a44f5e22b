"""Part 6: what a CUDA graph captures: no distributed step, which is refused by name; codecs, which replay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

import bagua
from bagua.codecs import Codec, Int4, MinMaxUInt8, Sign
from bagua.engine.api import live_engines
from benchmarks.gpu.record import Record, Skip

__all__ = ["run"]

_CODECS: tuple[Codec, ...] = (MinMaxUInt8(), Int4(), Sign())


def run(record: Record) -> None:
    """Refusals and replays."""
    on_gpu = torch.cuda.is_available() and not record.dry
    device = torch.device("cuda" if on_gpu else "cpu")
    with _world():
        for what in ("forward", "backward"):
            with record.check(f"capture of the {what} pass of a distributed module is refused"):
                _refused(what, device)
    for codec in _CODECS:
        with record.check(f"{codec!r}: captured and replayed, the bits of a plain call"):
            if not on_gpu:
                raise Skip("dry run")
            _replayed(codec)


@contextlib.contextmanager
def _world() -> Iterator[None]:
    mine = not torch.distributed.is_initialized()
    bagua.init_process_group()
    try:
        yield
    finally:
        if mine:
            bagua.destroy_process_group()


def _refused(what: str, device: torch.device) -> None:
    model = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer)
    x = torch.randn(4, 8, device=device)
    model(x).sum().backward()
    optimizer.step()
    side = torch.cuda.Stream() if device.type == "cuda" else None
    if side is not None:
        torch.cuda.synchronize()
    # Backward operations run on the stream of their forward pass: it must be the one that is captured.
    with contextlib.nullcontext() if side is None else torch.cuda.stream(side):
        output = model(x).sum() if what == "backward" else None
    said = ""
    try:
        with _capture(side):
            if output is None:
                model(x)
            else:
                output.backward()
    except RuntimeError as error:
        said = str(error)
    assert "cannot be captured" in said, said or "it was captured"
    bagua.detach(model)


@contextlib.contextmanager
def _capture(side: Any) -> Iterator[None]:
    if side is not None:
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
            yield
        return
    inventory = live_engines()[-1].inventory  # the engine's parts share it
    before = inventory.device
    object.__setattr__(inventory, "device", torch.device("cuda"))  # as if on a GPU
    try:
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
            yield
    finally:
        object.__setattr__(inventory, "device", before)


def _replayed(codec: Codec) -> None:
    x = torch.randn(3, 5000, device="cuda")
    wire, out = codec.encode(x).clone(), torch.empty_like(x)
    codec.decode(wire, 5000, out=out)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.encode(x, out=wire)
        codec.decode(wire, 5000, out=out)
    x.copy_(torch.randn(3, 5000, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, codec.decode(codec.encode(x), 5000))
