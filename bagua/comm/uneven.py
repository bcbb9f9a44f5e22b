"""Ranks with different numbers of batches, on the protocol of `torch.distributed.algorithms.Join`.

A rank that still trains announces each collective to the others. A rank that has run out of
inputs receives the announcement and takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Uneven"]


class Uneven(Joinable):
    """The channel for all announcements within a join.

    Args:
        process_group: a `ProcessGroup`, a one-dimensional `DeviceMesh`, or None for the default group.
        device: whose tensors the group can reduce.
        replay: takes part in an announced collective: its code (> 0) and the ranks that announced it.
        finish: called once all ranks have run out; with the ranks that were last, in order.

    Raises:
        ValueError: `process_group` is not a `torch.distributed` group.
    """

    def __init__(
        self,
        process_group: Any,
        device: torch.device,
        replay: Callable[[int, list[int]], None],
        finish: Callable[[list[int]], None],
    ) -> None:
        super().__init__()
        group = process_group.get_group() if hasattr(process_group, "get_group") else process_group
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"join: needs a process group of torch.distributed, not a {type(group).__name__}")
        self._group, self._device, self._replay, self._finish = group, device, replay, finish

    def context(self, enable: bool, throw_on_early_termination: bool) -> Join:
        """Torch's context manager."""
        return Join([self], enable, throw_on_early_termination)

    def announce(self, code: int) -> list[int]:
        """Announce a collective to ranks without inputs; returns the ranks that still have inputs.

        Raises:
            RuntimeError: a rank has run out and the join does not allow it, or another rank announces something else.
        """
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        codes = self._codes(code)
        if any(other not in (0, code) for other in codes):
            raise RuntimeError(
                f"join: ranks called different operations at the same time: codes {codes} by rank, {code} here"
            )
        return _present(codes)

    def _codes(self, code: int) -> list[int]:
        """The code that each rank announces; 0 for ranks without inputs."""
        codes = torch.zeros(self._group.size(), dtype=torch.int64, device=self._device)
        codes[self._group.rank()] = code
        dist.all_reduce(codes, group=self._group)
        return codes.tolist()

    def join_hook(self, **_: Any) -> JoinHook:
        """torch's hook for a rank without inputs."""
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        """As given."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """As given."""
        return self._group

    def _follow(self) -> None:
        codes = self._codes(0)
        present = _present(codes)
        self._replay(codes[present[0]], present)

    def _end(self, is_last_joiner: bool) -> None:
        self._finish(_present(self._codes(int(is_last_joiner))))


class _Hook(JoinHook):
    def __init__(self, uneven: Uneven) -> None:
        self._uneven = uneven

    def main_hook(self) -> None:
        self._uneven._follow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._uneven._end(is_last_joiner)


def _present(codes: list[int]) -> list[int]:
    return [rank for rank, code in enumerate(codes) if code]
