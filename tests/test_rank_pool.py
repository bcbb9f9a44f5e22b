"""The ranks of the tests."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.forks import Fork, check_single_threaded
from tests.rank_pool import RankPool


def name_and_end(last: int) -> tuple[int, int]:
    if dist.get_rank() == last:
        os._exit(9)
    return os.getpid(), hash("a name")


def test_ranks_that_vanish_are_replaced_and_order_sets_differently(pool: RankPool) -> None:
    before, gone = pool.run(2, name_and_end, 1, dies=[1])
    assert gone is None
    (pid, one), (_, other) = pool.run(2, name_and_end, 2)
    assert pid != before[0], "of a broken job no process is kept"
    assert one != other


@pytest.mark.filterwarnings("error")
def test_a_rank_that_is_stuck_is_killed_and_its_stack_shown_and_no_file_left_open(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0: not done in time; stacks:\n.*thread 0x"):
        pool.run(1, time.sleep, 1000, timeout_s=2)
    gc.collect()


def test_ranks_whose_test_has_ended_before_them_get_no_other_job(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object) -> None:
        raise KeyboardInterrupt

    pids = pool.run(2, os.getpid, init=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(pool._workers[0]), "receive", ends)
        pool.run(2, time.sleep, 1000, init=False)
    assert not set(pool.run(2, os.getpid, init=False)) & set(pids)


def leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def touch_and_sleep(path: Path) -> None:
    path.touch()
    time.sleep(1000)


def fork_some(path: Path) -> list[int]:
    check_single_threaded()
    codes = [Fork(lambda: None).wait(), Fork(lambda: os._exit(3)).wait()]
    child = Fork(lambda: touch_and_sleep(path))
    while not path.exists():
        time.sleep(0.01)
    with pytest.raises(AssertionError, match=r"(?s)did not end in 0.1 s:.*in touch_and_sleep"):
        child.wait(0.1)
    with pytest.raises(AssertionError, match="(?s)a forked process failed:.*ZeroDivisionError"):
        Fork(lambda: 1 // 0).wait()
    return codes


def test_fresh_ranks_have_no_threads_and_can_fork(pool: RankPool, tmp_path: Path) -> None:
    pool.run(1, leave_a_thread)
    with pytest.raises(AssertionError, match="would inherit the locks of"):
        pool.run(1, check_single_threaded, init=False)
    pool.run(1, leave_a_thread)
    assert pool.run(1, fork_some, tmp_path / "touched", init=False, fresh=True) == [[0, 3]]
