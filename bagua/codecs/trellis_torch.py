"""Trellis-coded quantisation in eager torch: the reference of `csrc/trellis.h`, which has the same tables.

The centroid of an element depends on its own code and on those before it. A state is the codes so far, the latest in
the lowest bits, of which it keeps log2(states) bits; before a block it is 0. A window is a state followed by a code: it
has a centroid, and its low bits are the next state. The codes of a block are those of the path of least squared error,
which the algorithm of Viterbi finds. All decisions are taken in integers, so compiled code finds the same path.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SCALE", "SHORTEST", "TRELLISES", "Trellis", "trellis_of"]

SCALE = 2048  # of the centroids
_UNREACHED = 12000  # cost of all states but the first, before a block
_AT_ONCE = 1 << 24  # costs of branches that are held in memory
# The centroid of each window, times 2048, for (bits, states): a generalised Lloyd algorithm on normally distributed
# numbers, as `python -m benchmarks.trellis`, the best of 24 to 60 random starts.
_CENTROIDS: Mapping[tuple[int, int], Sequence[int]] = {
    (1, 8): (2629, -647, 691, -2571, 1468, -1305, -1443, 1373, -557, 3248, -3213, 522, -1236, 1443, 1390, -1885),
    (1, 32): (
        *(-1313, 1527, -1396, 1317, -2535, 751, -724, 2441, -1184, 1204, -3045, 748, -490, 3128, -1518, 985),
        *(-3259, 672, -457, 3601, -636, 2418, -2395, 485, -1028, 1746, -1332, 1038, -3568, 322, -699, 2268),
        *(969, -2619, 1394, -1171, 753, -1897, 2095, -894, 1496, -1193, 710, -2472, 3632, -407, 1130, -1259),
        *(843, -1651, 2860, -532, 2792, -637, 631, -2888, 1468, -1271, 1181, -1256, 415, -3309, 2640, -775),
    ),
    (2, 8): (
        *(-4793, -1370, 308, 2053, -2302, -441, 1125, 3361, -1331, -3889, 2009, 327, -397, -2167, 3137, 1139),
        *(431, 2161, -3153, -1076, 1239, 3393, -1978, -313, 2293, 391, -1083, -3097, 4842, 1256, -316, -2064),
    ),
}
TRELLISES = tuple(_CENTROIDS)
SHORTEST = 32  # elements of a block: in shorter ones the first elements, whose windows are few, count for too much


@dataclass(frozen=True)
class Trellis:
    """Of `bits` bits for an element.

    Args:
        bits: of an element.
        table: the centroid of each window, times 2048, as many as there are states and codes.
    """

    bits: int
    table: tuple[int, ...]

    @property
    def states(self) -> int:
        """How many there are."""
        return len(self.table) >> self.bits

    def codes(self, x_MN: Tensor) -> Tensor:
        """Return the codes of the best path through each of M blocks.

        Args:
            x_MN: fp32 in units of 1/4096, of mean square 1. For the search elements are rounded, and cut off at 4.
        """
        units_MN = x_MN.clamp(-16384, 16383).round().to(torch.int32)
        rows = max(1, _AT_ONCE // (len(self.table) * x_MN.shape[1]))
        return torch.cat([self._path(part_mN) for part_mN in units_MN.split(rows)])

    def _path(self, x_MN: Tensor) -> Tensor:
        device, size, step = x_MN.device, x_MN.shape[0], 1 << self.bits
        centroid_W = torch.tensor(self.table, dtype=torch.int32, device=device)
        energy_W = (centroid_W * centroid_W + 0x8000) >> 16
        cost_MS = torch.full((size, self.states), _UNREACHED, dtype=torch.int32, device=device)
        cost_MS[:, 0] = 0
        branch_MNW = energy_W - (x_MN[..., None] * centroid_W >> 16)
        chosen = list[Tensor]()  # of each element [M, S]: the highest bits of the window that leads to the state
        for branch_MW in branch_MNW.unbind(1):
            from_MFS = (cost_MS.repeat_interleave(step, 1) + branch_MW).unflatten(1, (step, self.states))
            cost_MS, *others = from_MFS.unbind(1)
            best_MS = torch.zeros((), dtype=torch.uint8, device=device)
            for first, other_MS in enumerate(others, 1):  # the first of several that are equally good
                best_MS = torch.where(other_MS < cost_MS, torch.full_like(best_MS, first), best_MS)
                cost_MS = torch.minimum(cost_MS, other_MS)
            chosen.append(best_MS)
        least_M1 = cost_MS.amin(1, keepdim=True)
        state_M1 = torch.where(cost_MS == least_M1, torch.arange(self.states, device=device), self.states).amin(1, True)
        codes = list[Tensor]()
        for best_MS in reversed(chosen):
            codes.append(state_M1 & (step - 1))
            state_M1 = (best_MS.gather(1, state_M1).to(torch.int64) * self.states | state_M1) >> self.bits
        return torch.cat(codes[::-1], 1).to(torch.int32)

    def windows(self, codes: Tensor) -> Tensor:
        """Return the windows of the elements of blocks, [..., N], as `codes`."""
        window, depth = torch.zeros_like(codes), 0
        while len(self.table) >> depth > 1:
            window |= torch.nn.functional.pad(codes, (depth // self.bits, 0))[..., : codes.shape[-1]] << depth
            depth += self.bits
        return window & (len(self.table) - 1)

    def centroids(self, codes: Tensor) -> Tensor:
        """Return the fp32 centroids of the elements of blocks, [..., N]."""
        return torch.tensor(self.table, dtype=torch.float32, device=codes.device)[self.windows(codes)] / SCALE


@functools.cache
def trellis_of(bits: int, states: int) -> Trellis | None:
    """The trellis, or None with one state."""
    return Trellis(bits, tuple(_CENTROIDS[bits, states])) if states > 1 else None
