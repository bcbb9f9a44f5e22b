"""Part 4: how much of the device's memory bandwidth the codecs use, beside a copy measured in the same seconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bagua import codecs
from bagua.codecs import Bf16, Codec, Eden, Int4, MinMaxUInt8, Sign, TopK
from benchmarks.gpu.clock import pairs
from benchmarks.gpu.record import Record

__all__ = ["run"]

_PEERS = 8
_CODECS: tuple[Codec, ...] = (
    *(MinMaxUInt8(), Int4(), Sign(), Eden(), Eden(bits=2), Eden(bits=4), Eden(bits=2, states=8), TopK(), Bf16()),
)


def run(record: Record) -> None:
    """A row for each codec, operation and size.

    The traffic of an operation is what it must read and write at least once; the share is its rate over that of a copy
    of as many elements, which reads and writes 4 bytes of each. 10 MB stay in the second-level cache of large GPUs.
    """
    on_gpu = torch.cuda.is_available() and not record.dry
    device = torch.device("cuda" if on_gpu else "cpu")
    record.facts.update(device=str(device), backend=codecs.backend(device), peers=_PEERS)
    for megabytes in (10, 100, 400) if on_gpu else (0.01,):
        n = int(megabytes * 1e6 / 4)
        copy_once = partial(torch.empty(n, device=device).copy_, torch.ones(n, device=device))
        for codec in _CODECS:
            with record.check(f"{codec!r}, {megabytes:g} MB"):
                for name, (call, traffic) in _operations(codec, n, device).items():
                    times = (max(1, int(400 / megabytes)) if megabytes < 400 else 1) if on_gpu else 1
                    measured = pairs(copy_once, call, 15 if on_gpu else 2, min(times, 20), device)
                    copy = statistics.median(a for a, _ in measured)
                    own = statistics.median(b for _, b in measured)
                    record.row(
                        codec=repr(codec),
                        operation=name,
                        megabytes=megabytes,
                        us=round(own * 1e6, 1),
                        traffic_gb_per_s=round(traffic / own / 1e9, 1),
                        memcpy_gb_per_s=round(8 * n / copy / 1e9, 1),
                        share=round(statistics.median(traffic / b / (8 * n / a) for a, b in measured), 3),
                    )


def _operations(codec: Codec, n: int, device: torch.device) -> dict[str, tuple[Callable[[], Any], float]]:
    """Calls on buffers that are used again, and the bytes that each must move."""
    x, residual = torch.randn(1, n, device=device), torch.zeros(1, n, device=device)
    wire, out = codec.encode(x).clone(), torch.empty(1, n, device=device)
    width, again = wire.shape[1], torch.empty_like(wire)
    # One chunk of each of the peers, as the owner of a chunk sees them: as many elements in all as the payload has.
    part = max(1, n // _PEERS)
    rows = codec.encode(torch.randn(_PEERS, part, device=device)).clone()
    chunk, kept = torch.empty(part, device=device), torch.zeros(part, device=device)
    fed = torch.empty(1, rows.shape[1], dtype=torch.uint8, device=device)
    return {
        "encode": (lambda: codec.encode(x, out=again), 4 * n + width),
        "decode": (lambda: codec.decode(wire, n, out=out), width + 4 * n),
        "encode_with_feedback": (lambda: codec.encode_with_feedback(x, residual, out=again), 12 * n + width),
        f"decode_mean {_PEERS}": (lambda: codec.decode_mean(rows, part, chunk, 1 / _PEERS), rows.nbytes + 4 * part),
        f"decode_mean_encode {_PEERS}": (
            lambda: codec.decode_mean_encode(rows, part, 1 / _PEERS, kept, out=fed),
            rows.nbytes + 8 * part + fed.nbytes,
        ),
    }
