"""PowerSGD: mean over all ranks in low-rank form."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from bagua.codecs import Bf16, Codec, Identity
from bagua.comm.groups import Groups
from bagua.exchanges.all_reduce import AllReduce
from bagua.exchanges.base import Exchange, State, check_codec
from bagua.exchanges.payload_source import PayloadSource

__all__ = ["PowerSGD", "rank_for_shape"]

_SEED = 1905_13727  # of the first right factors; any number, as long as it is the same on all ranks
_LOADING = threading.Lock()


class _Matrix(NamedTuple):
    """A part of the bucket that is compressed: [n, m] of rank r; where it starts in the bucket and the packed ones."""

    start: int
    n: int
    m: int
    r: int
    dense: int
    left: int
    right: int


class _Layout(NamedTuple):
    """What is compressed, sorted so that left factors of one shape lie side by side, and what is not."""

    matrices: tuple[_Matrix, ...]
    rest: tuple[tuple[int, int], ...]
    num_dense: int
    num_left: int
    num_right: int
    num_rest: int


@dataclass(frozen=True)
class PowerSGD(Exchange):
    """Mean over ranks, with each large matrix M of the bucket replaced by a low-rank P Q^T.

    P = mean(M Q); P = orthonormalise(P); Q = mean(M^T P); M' = P Q^T. Q starts from the step before. All P of the
    bucket ride one all-reduce, all Q and what is not compressed ride a second one. With error feedback,
    M += e before and e = M - P (M^T P)^T after, with the rank's own M^T P: with the mean in its place the result
    would be the same, but the differences between ranks would accumulate in e.

    The work is done in fp32 (fp64 for fp64 payloads). Vectors, and matrices for which
    `min_compression * r * (n + m) > n * m`, are averaged exactly. Householder QR yields orthonormal columns for
    any P, so a zero or rank-deficient gradient cannot leave dead columns behind.

    Args:
        shapes: (n, m) of each parameter, in the order of the bucket; (1, n) for a vector.
        rank: columns of P and Q; at most min(n, m) are used. None (default): `rank_for_shape` of each matrix.
        error_feedback: add the compression error of one step to the next.
        min_compression: compress a matrix only if P and Q have at least this many times fewer elements than it.
        codec: of P, Q and what is not compressed: identity or bf16. Errors of rounding are not fed back.

    State: `right`, all Q^T; with error feedback `error`, one element for each one that is compressed.
    Bytes: 2 (R-1)/R times 4 bytes for each element of P, Q and the rest, sent per rank; 2 bytes with bf16.
    Source: arXiv:1905.13727 (PowerSGD), algorithms 1 and 2.
    Differs: QR instead of Gram-Schmidt; factors in bf16.

    Examples:
        >>> exchange = bagua.exchanges.PowerSGD(shapes=((64, 32),), rank=4)
    """

    shapes: tuple[tuple[int, int], ...]
    rank: int | None = None
    error_feedback: bool = True
    min_compression: float = 2.0
    codec: Codec = field(default_factory=Identity, repr=False)  # saved states fit any

    def __post_init__(self) -> None:
        rank = self.rank
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise ValueError(f"rank: expected an integer >= 1, or None for a rank by shape, got {rank!r}")
        ratio = self.min_compression
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < math.inf:
            raise ValueError(f"min_compression: expected a number > 0, got {ratio!r}")
        check_codec("PowerSGD", self.codec)
        if not isinstance(self.codec, Identity | Bf16):  # P has squares of singular values: too small for fp16
            raise ValueError(f"PowerSGD: codec: expected 'identity' or 'bf16', got {self.codec.name!r}")

    @property
    def name(self) -> str:
        """power_sgd, the rank, and whether errors are fed back."""
        rank = "by shape" if self.rank is None else self.rank
        codec = "" if self.codec.lossless else f", {self.codec.name}"
        return f"power_sgd[rank {rank}{codec}{', error feedback' if self.error_feedback else ''}]"

    @property
    def lossy(self) -> bool:
        """Unless there is nothing to compress."""
        return bool(self._layout.matrices) or not self.codec.lossless

    @property
    def fed_back(self) -> tuple[str, ...]:
        """The errors. The right factors of a former step are as good as random ones, which all ranks have alike."""
        return ("error",) if self.error_feedback else ()

    def rank_of(self, n: int, m: int) -> int:
        """Return the rank at which a matrix [n, m] is exchanged; 0 if it is averaged exactly.

        Examples:
            >>> exchange = bagua.exchanges.PowerSGD(shapes=((64, 32), (1, 64)), rank=4)
            >>> exchange.rank_of(64, 32), exchange.rank_of(1, 64)
            (4, 0)
        """
        r = rank_for_shape(n, m) if self.rank is None else min(self.rank, n, m)
        return r if min(n, m) > 1 and self.min_compression * r * (n + m) <= n * m else 0

    @functools.cached_property
    def _layout(self) -> _Layout:
        found: list[tuple[int, int, int, int]] = []
        rest: list[tuple[int, int]] = []
        start = 0
        for n, m in self.shapes:
            if r := self.rank_of(n, m):
                found.append((n, r, m, start))
            elif rest and rest[-1][1] == start:
                rest[-1] = (rest[-1][0], start + n * m)
            else:
                rest.append((start, start + n * m))
            start += n * m
        matrices: list[_Matrix] = []
        dense = left = right = 0
        for n, r, m, at in sorted(found):
            matrices.append(_Matrix(at, n, m, r, dense, left, right))
            dense, left, right = dense + n * m, left + n * r, right + m * r
        return _Layout(tuple(matrices), tuple(rest), dense, left, right, sum(b - a for a, b in rest))

    def init(self, x_N: Tensor, groups: Groups) -> State:
        """Random Q, the same on all ranks, and zero errors; nothing with a single rank.

        Raises:
            ValueError: `x_N` does not hold matrices of these shapes.
        """
        layout, dtype, device = self._layout, _work_dtype(x_N.dtype), x_N.device
        self._check_numel(x_N.numel())
        if groups.size == 1:
            return {}
        if device.type == "cuda":
            _load_linalg(device)
        generator = torch.Generator().manual_seed(_SEED)
        state = {"right": torch.randn(layout.num_right, generator=generator, dtype=torch.float64).to(device, dtype)}
        if self.error_feedback:
            state["error"] = torch.zeros(layout.num_dense, dtype=dtype, device=device)
        return state

    def memory(self, state: State, n: int, lo: int, hi: int, groups: Groups) -> Sequence[Tensor]:
        """Right factors and errors of the matrices that the range meets, each whole."""
        found: list[Tensor] = []
        for each in self._layout.matrices if state else ():
            if each.start < hi and lo < each.start + each.n * each.m:
                found.append(state["right"][each.right : each.right + each.m * each.r])
                if self.error_feedback:
                    found.append(state["error"][each.dense : each.dense + each.n * each.m])
        return found

    def reads(self, x_N: Tensor) -> bool:
        """Where matrices need not be converted."""
        return x_N.device.type == "cpu" and x_N.dtype == _work_dtype(x_N.dtype) and self.lossy

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Shapes: x_N is [N], N the elements of all shapes; packed, P: all left factors, Q: right ones and rest."""
        self._run(x_N, None, state, groups, step)

    def run_from(self, source: PayloadSource, state: State, groups: Groups, step: int) -> None:
        """As `run`, with the same bits: matrices are read where they lie."""
        x_N = source.x_N
        if groups.world.size == 1 or source.hook is not None or not self.reads(x_N):
            super().run_from(source, state, groups, step)
            return
        for start, stop in self._layout.rest:
            source.fill(start, stop)
        self._run(x_N, source, state, groups, step)

    def _run(self, x_N: Tensor, source: PayloadSource | None, state: State, groups: Groups, step: int) -> None:
        group, buffers, layout = groups.world, groups.buffers, self._layout
        if group.size == 1 or x_N.numel() == 0:
            return
        dtype, device, mean = _work_dtype(x_N.dtype), x_N.device, AllReduce(self.codec)
        p_P = buffers.get("left", (layout.num_left,), dtype, device)
        q_Q = buffers.get("right_and_rest", (layout.num_right + layout.num_rest,), dtype, device)
        rest = [x_N[start:stop] for start, stop in layout.rest]
        targets = [x_N[each.start : each.start + each.n * each.m].view(each.n, each.m) for each in layout.matrices]
        lefts, rights = _lefts(layout, p_P), _rights(layout, q_Q)
        if targets:
            matrices = self._take(targets if source is None else _read(source, layout), state, groups)
            for matrix, right, left in zip(matrices, _rights(layout, state["right"]), lefts, strict=True):
                torch.mm(matrix, right.t(), out=left)
            overflowed = not bool(p_P.isfinite().all()) if device.type == "cpu" else True
            mean.run(p_P, {}, groups, step)
            _orthonormalise_(layout, p_P)
            for matrix, left, right in zip(matrices, lefts, rights, strict=True):
                torch.mm(left.t(), matrix, out=right)
            if self.error_feedback:
                for matrix, left, right in zip(matrices, lefts, rights, strict=True):
                    matrix.addmm_(left, right, alpha=-1)
                # An overflowed step is skipped by the GradScaler; its NaN must not come back forever. What is not
                # finite in a matrix is not finite in its P.
                if overflowed or not bool(p_P.isfinite().all()):
                    state["error"].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        _pack(q_Q[layout.num_right :], rest)
        mean.run(q_Q, {}, groups, step)
        _unpack(q_Q[layout.num_right :], rest)
        if targets:
            new, old = q_Q[: layout.num_right], state["right"]
            old.copy_(torch.where(new.isfinite(), new, old))
        for target, left, right in zip(targets, lefts, rights, strict=True):
            if target.dtype == dtype:
                torch.mm(left, right, out=target)
            else:
                target.copy_(torch.mm(left, right, out=buffers.get("low_rank", tuple(target.shape), dtype, device)))

    def bytes_per_rank(self, n: int, size: int) -> float:
        """2 (R-1)/R times the encoded P, Q and rest.

        Raises:
            ValueError: `n` is not the number of elements of all shapes.
        """
        self._check_numel(n)
        layout, mean = self._layout, AllReduce(self.codec)
        second = layout.num_right + layout.num_rest
        return mean.bytes_per_rank(layout.num_left, size) + mean.bytes_per_rank(second, size)

    def _check_numel(self, n: int) -> None:
        if n != sum(rows * columns for rows, columns in self.shapes):
            raise ValueError(f"PowerSGD: got {n} elements, which do not fill the shapes {list(self.shapes)}")

    def _take(self, targets: Sequence[Tensor], state: State, groups: Groups) -> list[Tensor]:
        """What is compressed, in the work dtype: gradient plus error (in the error's place), or the gradient."""
        layout, dtype = self._layout, state["right"].dtype
        if self.error_feedback:
            matrices = _denses(layout, state["error"])
            for matrix, target in zip(matrices, targets, strict=True):
                matrix.add_(target)
            return matrices
        if targets[0].dtype == dtype:
            return list(targets)
        matrices = _denses(layout, groups.buffers.get("dense", (layout.num_dense,), dtype, targets[0].device))
        for matrix, target in zip(matrices, targets, strict=True):
            matrix.copy_(target)
        return matrices


def rank_for_shape(n: int, m: int) -> int:
    """Return the rank for a matrix [n, m]: the root of the shorter side (docs/algorithms/power_sgd.md has figures)."""
    return round(math.sqrt(min(n, m)))


def _read(source: PayloadSource, layout: _Layout) -> list[Tensor]:
    """The matrices of a payload, each where it lies."""
    found: list[Tensor] = []
    for each in layout.matrices:
        start, stop = each.start, each.start + each.n * each.m
        found.append(source.read(start, stop, source.x_N[start:stop]).view(each.n, each.m))
    return found


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _denses(layout: _Layout, flat: Tensor) -> list[Tensor]:
    return [flat[each.dense : each.dense + each.n * each.m].view(each.n, each.m) for each in layout.matrices]


def _lefts(layout: _Layout, flat: Tensor) -> list[Tensor]:
    return [flat[each.left : each.left + each.n * each.r].view(each.n, each.r) for each in layout.matrices]


def _rights(layout: _Layout, flat: Tensor) -> list[Tensor]:
    # Q^T: products whose result is [m, r] with few columns take ten times as long on a CPU.
    return [flat[each.right : each.right + each.m * each.r].view(each.r, each.m) for each in layout.matrices]


def _orthonormalise_(layout: _Layout, p_P: Tensor) -> None:
    """Make the columns of each left factor orthonormal; factors of one shape in one call."""
    for (n, r), same in groupby(layout.matrices, key=lambda each: (each.n, each.r)):
        group = list(same)
        start = group[0].left
        factors = p_P[start : start + len(group) * n * r].view(len(group), n, r)
        factors.copy_(torch.linalg.qr(factors).Q)


@functools.cache
def _load_linalg(device: torch.device) -> None:
    """Have torch load its linear algebra for GPUs: the first call of it fails if another thread makes one too."""
    with _LOADING:
        torch.linalg.qr(torch.eye(2, device=device))


def _pack(flat: Tensor, parts: Sequence[Tensor]) -> None:
    at = 0
    for part in parts:
        flat[at : at + part.numel()].copy_(part)
        at += part.numel()


def _unpack(flat: Tensor, parts: Sequence[Tensor]) -> None:
    at = 0
    for part in parts:
        part.copy_(flat[at : at + part.numel()])
        at += part.numel()
