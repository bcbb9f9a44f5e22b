"""Times operations next to memcpy."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from bagua import codecs
from bagua.bench.turns import turns

from .targets import CASES, Case, calls


def seconds_of(call: Callable[[], Any], warm: bool) -> float:
    """Wall time of one call; ``warm``: of the second of two, which finds its buffers in the caches."""
    if warm:
        call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def memcpy(n: int) -> Callable[[], Any]:
    """libc's memcpy of ``n`` fp32 elements."""
    source, target = torch.ones(n), torch.zeros(n)
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), 4 * n)


def row(case: Case, backend: str, size_mb: float, n: int, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians over the pairs (seconds of memcpy, seconds of the operation)."""
    ratio = statistics.median(copy / call for copy, call in pairs)
    target = case.target(size_mb)
    return {
        "codec": repr(case.codec),
        "operation": case.operation,
        "backend": backend,
        "size_mb": size_mb,
        "gb_per_s": round(4 * n / statistics.median(call for _, call in pairs) / 1e9, 2),
        "memcpy_gb_per_s": round(4 * n / statistics.median(copy for copy, _ in pairs) / 1e9, 2),
        "ratio": round(ratio, 3),
        "runs": len(pairs),
        "target": target,
        "met": None if target is None else ratio >= target,
        "headline": case.headline and target is not None,
    }


def _pair(copy: Callable[[], Any], call: Callable[[], Any], backend: str, warm: bool) -> tuple[float, float]:
    """Seconds of a memcpy and of an operation right after it."""
    with codecs.use_backend(backend):
        return seconds_of(copy, warm), seconds_of(call, warm)


def measure(sizes_mb: Sequence[float], backends: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each size, backend and case.

    Each timed call comes right after a timed memcpy of the same size: the load of other processes changes from one
    moment to the next, and so it hits both alike. All backends and, where they fit into memory, all cases take
    turns, so that a burst of load falls on a few runs of each.
    """
    for size_mb in sizes_mb:
        n = int(size_mb * 1e6 / 4)
        copy = memcpy(n)
        every = list(dict.fromkeys(case.codec for case in CASES))
        small = size_mb <= 16
        for together in [every] if small else [[codec] for codec in every]:
            operations = {codec: dict(calls(codec, n)) for codec in together}
            runs = [(case, backend) for case in CASES if case.codec in together for backend in backends]
            pairs = turns(
                {
                    (case, backend): partial(_pair, copy, operations[case.codec][case.operation], backend, small)
                    for case, backend in runs
                },
                rounds,
                warmup=1,
            )
            for case, backend in runs:
                yield row(case, backend, size_mb, n, pairs[case, backend])
