"""Processes that are forked or killed at bad moments leave the cache whole."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

from bagua.data import CacheLoader
from bagua.data.cache.client import close_all
from bagua.data.cache.fork_safety import ForkLock
from tests.forks import Fork
from tests.rank_pool import RankPool


def sample(key: int) -> torch.Tensor:
    return torch.full((30_000,), key, dtype=torch.int32)


def test_writers_that_are_killed_leave_whole_entries_or_none(cache_path: Path, pool: RankPool) -> None:
    pool.run(1, kill_writers, cache_path, init=False, fresh=True)


def kill_writers(cache_path: Path) -> None:
    loader = CacheLoader("lmdb", path=cache_path, writer_buffer_size=5)
    found = 0
    for attempt in range(40):
        if attempt >= 8 and found > 20:
            break
        begin = 1000 * attempt

        def write(begin: int = begin) -> None:
            for key in range(begin, begin + 1000):
                loader.get(key, sample)

        child = Fork(write)
        time.sleep(0.03 + 0.02 * attempt)
        child.kill()
        before = loader.stats.num_hits
        for key in range(begin, begin + 1000, 7):
            assert torch.equal(loader.get(key, sample), sample(key))
        found += loader.stats.num_hits - before
    assert loader.stats.num_damaged == 0
    assert found > 20, "no child came to write anything"


def test_forks_in_the_middle_of_reads_and_writes(cache_path: Path, pool: RankPool) -> None:
    pool.run(1, fork_while_threads_read_and_write, cache_path, init=False, fresh=True)


def fork_while_threads_read_and_write(cache_path: Path) -> None:
    """The cache's own threads and locks are what is tested; there are no others in the process."""
    loader = CacheLoader("lmdb", path=cache_path, writer_buffer_size=5)
    stop, problems = threading.Event(), []

    def keep_busy(begin: int) -> None:
        key = begin
        while not stop.is_set():
            key += 1
            if not torch.equal(loader.get(key % 300, sample), sample(key % 300)):
                problems.append(key)
            if key % 50 == 0:
                loader.clear()

    def read_and_write() -> None:
        for key in (*range(0, 300, 11), *range(500, 510)):
            assert torch.equal(loader.get(key, sample), sample(key))
        close_all()

    # PyTorch initialises each operator at its first call, under a lock that a fork does not release in the child.
    for _ in ("a miss", "a hit"):
        assert torch.equal(loader.get(0, sample), sample(0))
        loader.flush()
    loader.clear()
    threads = [threading.Thread(target=keep_busy, args=(begin,)) for begin in (0, 150)]
    for thread in threads:
        thread.start()
    try:
        codes = [Fork(read_and_write).wait() for _ in range(15)]
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert codes == [0] * 15
    assert not problems
    assert loader.get(1, sample)[0] == 1 and loader.status().available


def test_a_child_of_a_child(cache_path: Path, pool: RankPool) -> None:
    pool.run(1, fork_twice, cache_path, init=False, fresh=True)


def fork_twice(cache_path: Path) -> None:
    loader = CacheLoader("lmdb", path=cache_path)
    loader.get(1, sample)
    loader.flush()

    def never(key: int) -> torch.Tensor:
        raise AssertionError

    def child() -> None:
        assert loader.get(1, never)[0] == 1
        assert Fork(lambda: loader.get(1, never)).wait() == 0
        assert loader.get(1, never)[0] == 1

    assert Fork(child).wait() == 0
    assert loader.get(1, never)[0] == 1


def test_a_fork_waits_for_those_inside_and_keeps_others_out() -> None:
    lock, order = ForkLock(), []

    class Member:
        def suspend(self) -> None:
            order.append("suspended")

        def abandon(self) -> None: ...

    member = Member()
    lock._members.add(member)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with lock:
            inside.set()
            leave.wait(60)
            order.append("left")

    def come_late() -> None:
        with lock:
            order.append("late")

    first = threading.Thread(target=stay)
    first.start()
    assert inside.wait(60)
    forking = threading.Thread(target=lock._before)
    forking.start()
    while not lock._forking:
        time.sleep(0.001)
    late = threading.Thread(target=come_late)
    late.start()
    leave.set()
    forking.join(60)
    assert order == ["left", "suspended"]
    lock._after_in_parent()
    late.join(60)
    first.join(60)
    assert order == ["left", "suspended", "late"]
