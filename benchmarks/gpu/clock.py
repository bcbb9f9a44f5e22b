"""Time on the device: pairs of two things that take turns, as the clocks of a GPU change within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bagua.bench import turns

__all__ = ["pairs", "seconds_of"]

Call = Callable[[], Any]


def seconds_of(call: Call, times: int, device: torch.device) -> float:
    """Seconds of one of `times` calls back to back, on the device where there is one."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begun) / times


def pairs(first: Call, second: Call, rounds: int, times: int, device: torch.device) -> list[tuple[float, float]]:
    """Seconds of both, `rounds` times in turn, the order changing; one round before that is not counted."""
    one, other = (partial(seconds_of, call, times, device) for call in (first, second))
    return turns.pairs(one, other, rounds + 1)[1:]
