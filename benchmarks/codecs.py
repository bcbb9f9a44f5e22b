"""Speed of the codecs: GB/s of fp32 and the ratio to a memcpy of the same size in the same process.

``python -m benchmarks.codecs --json out/codecs.json [--quick]``. One thread, buffers reused, the best of many
runs; 1 and 10 MB then stay in the caches, 100 MB does not. For ``decode_mean`` the output's bytes count.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bagua import codecs
from bagua.codecs import Codec, Int4, MinMaxUInt8, Sign, TopK

CODECS: tuple[Codec, ...] = (
    codecs.get("identity"),
    codecs.get("bf16"),
    codecs.get("fp16"),
    MinMaxUInt8(),
    MinMaxUInt8(block=512),
    MinMaxUInt8(block=None),
    Int4(),
    Sign(),
    TopK(ratio=0.01),
    TopK(ratio=0.001),
)


def best_seconds(call: Callable[[], Any], seconds: float) -> float:
    """The shortest of at least three calls, repeated for about ``seconds``."""
    call()
    best, count, end = float("inf"), 0, time.perf_counter() + seconds
    while count < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        count += 1
    return best


def operations(codec: Codec, n: int, peers: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls to time; all outputs exist before."""
    generator = torch.Generator().manual_seed(1)
    x_1N = torch.randn((1, n), generator=generator)
    wire_1W = codec.encode(x_1N, out=torch.empty((1, codec.wire_bytes(n)), dtype=torch.uint8))
    out_1N = torch.empty_like(x_1N)
    yield "encode", lambda: codec.encode(x_1N, out=wire_1W)
    yield "decode", lambda: codec.decode(wire_1W, n, out=out_1N)
    wire_RW = wire_1W.repeat(peers, 1)
    yield f"decode_mean {peers}", lambda: codec.decode_mean(wire_RW, n, out_1N[0], 1 / peers)


def memcpy_gb_per_s(n: int, seconds: float) -> float:
    """GB/s of libc's memcpy of ``n`` fp32 elements."""
    source, target = torch.ones(n), torch.zeros(n)
    args = target.data_ptr(), source.data_ptr(), 4 * n
    return 4 * n / best_seconds(lambda: ctypes.memmove(*args), seconds) / 1e9


def measure(sizes_mb: Sequence[float], peers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """One row for each size, codec, backend and operation."""
    for size_mb in sizes_mb:
        n = int(size_mb * 1e6 / 4)
        for codec in CODECS:
            # Top-k has no compiled kernels.
            backends = codecs.available_backends() if not isinstance(codec, TopK) else ("torch",)
            for backend in backends:
                with codecs.use_backend(backend):
                    for operation, call in operations(codec, n, peers):
                        memcpy = memcpy_gb_per_s(n, seconds)  # again each time: other load changes it
                        gb_per_s = 4 * n / best_seconds(call, seconds) / 1e9
                        yield {
                            "codec": repr(codec),
                            "backend": backend,
                            "operation": operation,
                            "size_mb": size_mb,
                            "gb_per_s": round(gb_per_s, 2),
                            "memcpy_gb_per_s": round(memcpy, 2),
                            "ratio": round(gb_per_s / memcpy, 3),
                        }


def hardware() -> str:
    """Name of the CPU and number of cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    return f"{name}, {os.cpu_count()} cores"


def main(argv: list[str] | None = None) -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="1 and 10 MB only, and few repetitions")
    parser.add_argument("--mb", type=float, nargs="+", metavar="MB", help="sizes in MB of fp32 (1 10 100)")
    parser.add_argument("--peers", type=int, default=8, help="rows of decode_mean (default: %(default)s)")
    args = parser.parse_args(argv)
    sizes = args.mb or ([1, 10] if args.quick else [1, 10, 100])

    torch.set_num_threads(1)
    print(f"{'codec':<32} {'backend':<16} {'operation':<14} {'MB':>6} {'GB/s':>7} {'memcpy':>7} {'ratio':>6}")
    results = []
    for row in measure(sizes, args.peers, 0.05 if args.quick else 0.3):
        results.append(row)
        print(
            f"{row['codec']:<32} {row['backend']:<16} {row['operation']:<14} {row['size_mb']:>6g} "
            f"{row['gb_per_s']:>7.1f} {row['memcpy_gb_per_s']:>7.1f} {row['ratio']:>6.2f}",
            flush=True,
        )
    if args.json:
        report = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "hardware": hardware(),
            "torch": torch.__version__,
            "threads": 1,
            "results": results,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
