"""Ranks as processes of this machine, for measurements that need no emulated network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import bagua

__all__ = ["run_ranks"]


def run_ranks(work: Callable[..., None], size: int, *args: Any) -> None:
    """Run `work(rank, *args)` in `size` new processes that share a gloo process group; one thread each.

    Args:
        work: a function of a module, which the processes import.
        size: number of ranks.
        args: what pickle takes.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; with its traceback. The others are ended.
        torch.multiprocessing.ProcessExitedException: a rank was killed. The others are ended.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = (store.port, size, work, args)
    context = mp.start_processes(_rank_main, job, size, join=False, daemon=True, start_method="spawn")
    assert context is not None
    while not context.join():
        continue


def _rank_main(rank: int, port: int, size: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    bagua.init_process_group("gloo", store=store, rank=rank, world_size=size)
    work(rank, *args)
    bagua.destroy_process_group()
