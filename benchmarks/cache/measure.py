"""Times of first and second epochs, side by side with the uncached loader, and bytes per second of hits."""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bagua.bench.turns import quartiles
from bagua.data import CacheLoader
from bagua.data.cache.client import close_all
from benchmarks.cache.contenders import Contender
from benchmarks.cache.workload import SAMPLE_BYTES, Samples, compute

__all__ = ["hit_bytes_per_s", "measure"]


def measure(contender: Contender, uncached: Contender, rounds: int, pairs: int, samples: int) -> dict[str, Any]:
    """Return a row: milliseconds a sample in the first epoch, in later ones, and of the uncached loader beside it.

    Each of the `pairs` takes new samples; the uncached loader runs right before or after on as many, in turns. What
    an epoch computed last is written while training goes on; how long that takes after its end is `tail_ms`, of which
    the length of the epoch is no part.
    """
    first_ms, plain_ms, later_ms, ratios, tails_ms = [], [], [], [], []
    for pair in range(pairs):
        data = Samples(pair * samples, samples, rounds)
        with _directory() as directory:
            batches, finish = contender.make(data, directory)
            plain, _ = uncached.make(data, directory)
            theirs = _epoch(plain, data) if pair % 2 else 0.0
            ours = _epoch(batches, data)
            begin = time.perf_counter()
            finish()
            tails_ms.append(1000 * (time.perf_counter() - begin))
            theirs = theirs or _epoch(plain, data)
            first_ms.append(ours)
            plain_ms.append(theirs)
            ratios.append(ours / theirs)
            later_ms += [_epoch(batches, data) for _ in range(3)]
            del batches
            close_all()
    ratio = quartiles(ratios)
    return {
        "name": contender.name,
        "note": contender.note,
        "first_epoch_ms": statistics.median(first_ms),
        "uncached_ms": statistics.median(plain_ms),
        "tail_ms": statistics.median(tails_ms),
        "later_epoch_ms": statistics.median(later_ms),
        "first_epoch_over_uncached": ratio.median,
        "first_epoch_over_uncached_quartiles": [ratio.low, ratio.high],
        "speedup": statistics.median(first_ms) / statistics.median(later_ms),
    }


def _epoch(batches: Iterable[Any], data: Samples) -> float:
    """Read all once; milliseconds a sample. Every sample is looked at."""
    seen = 0
    begin = time.perf_counter()
    for batch in batches:
        for sample in batch:
            assert sample["image"][0, 0, 0] == sample["label"]
            seen += sample["label"] - data.begin
    taken = time.perf_counter() - begin
    assert seen == len(data) * (len(data) - 1) // 2, "samples are missing, or were read twice"
    return 1000 * taken / len(data)


def hit_bytes_per_s(num_processes: int, seconds: float) -> list[float]:
    """Bytes per second that each of some processes gets from one LMDB cache, checksums compared."""
    with _directory() as directory:
        loader = CacheLoader("lmdb", path=directory)
        for index in range(200):
            loader.get(index, lambda index: compute(index, 1))
        loader.close()
        context = multiprocessing.get_context("fork")
        results: Any = context.Queue()
        barrier = context.Barrier(num_processes)
        processes = [
            context.Process(target=_read_hits, args=(loader, seconds, barrier, results)) for _ in range(num_processes)
        ]
        for process in processes:
            process.start()
        rates = [results.get(timeout=60 + seconds) for _ in processes]
        for process in processes:
            process.join(30)
        return rates


def _read_hits(loader: CacheLoader, seconds: float, barrier: Any, results: Any) -> None:
    import torch

    torch.set_num_threads(1)
    for index in range(200):
        loader.get(index, _never)  # maps the file
    barrier.wait(30)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        loader.get(count * 7 % 200, _never)
        count += 1
    results.put(count * SAMPLE_BYTES / (time.perf_counter() - begin))


def _never(index: int) -> Any:
    raise AssertionError(f"sample {index} should be in the cache")


@contextmanager
def _directory() -> Iterator[Path]:
    """An empty directory, and its namesake in shared memory, for one contender."""
    path = Path(tempfile.mkdtemp(prefix="bagua-bench-cache-"))
    try:
        yield path
    finally:
        close_all()
        shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(Path("/dev/shm") / path.name, ignore_errors=True)
