"""What exchanges of low-rank factors have in common: which parts of a bucket are matrices, and the two all-reduces."""

from __future__ import annotations

import functools
import math
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from bagua.codecs import Bf16, Codec, Identity
from bagua.comm.groups import Groups
from bagua.exchanges.all_reduce import AllReduce
from bagua.exchanges.base import Exchange, State, check_codec
from bagua.exchanges.payload_source import PayloadSource

__all__ = ["TYPICAL", "Factored", "Layout", "LowRank", "Matrix", "inverse_size", "matrix_shape", "typical_bytes"]

TYPICAL = (1024, 1024)  # the matrix for which figures without a model speak
_SEED = 1905_13727  # of the first right factors; any number, as long as it is the same on all ranks
_LOADING = threading.Lock()


class Matrix(NamedTuple):
    """A part of the bucket that is factored: [n, m] of rank r; where it starts in the bucket and the packed ones."""

    start: int
    n: int
    m: int
    r: int
    dense: int
    left: int
    right: int
    number: int  # of its shape


class Layout(NamedTuple):
    """What is factored, sorted so that left factors of one shape lie side by side, and what is not."""

    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]
    num_dense: int
    num_left: int
    num_right: int
    num_rest: int


class Factored(NamedTuple):
    """One matrix on its way through the exchange.

    Attributes:
        place: where it lies.
        gradient: [n, m] this rank's, as it was given.
        matrix: [n, m] what is factored, in the work dtype; `gradient` itself, or a tensor that outlives the exchange.
        left: [n, r] P, with orthonormal columns.
        right: [r, m] R^T = P^T matrix, this rank's own until the second all-reduce, then the mean.
    """

    place: Matrix
    gradient: Tensor
    matrix: Tensor
    left: Tensor
    right: Tensor


class LowRank(Exchange):
    """Base class: P = orthonormalise(mean(M Q)), R = mean(M^T P), one power iteration that starts from the Q before.

    All P of the bucket ride one all-reduce, all R and what is not factored a second one. Each matrix is then replaced
    by the product of its factors. The work is done in fp32 (fp64 for fp64 payloads). Householder QR yields orthonormal
    columns for any P, so a zero or rank-deficient gradient cannot leave dead columns behind.

    A subclass is a frozen dataclass with these attributes as fields.

    Attributes:
        shapes: (n, m) of each parameter, in the order of the bucket; (1, n) for a vector.
        codec: of the factors and of what is not factored: identity or bf16.
    """

    shapes: tuple[tuple[int, int], ...]
    codec: Codec

    @abstractmethod
    def rank_of(self, n: int, m: int) -> int:
        """Return the rank at which a matrix [n, m] is exchanged; 0 if it is averaged exactly."""

    @property
    @abstractmethod
    def kept(self) -> str:
        """Name of the state with one element for each one that is factored, which is added to the gradient; or ""."""

    @abstractmethod
    def _keep(self, factored: Sequence[Factored], state: State, finite: bool) -> None:
        """With the rank's own R: change what is kept.

        Args:
            finite: all P are. What is not finite in a matrix of any rank is not finite in its P. Always false on a
                GPU, where to look would wait.
        """

    @abstractmethod
    def _finish(self, factored: Sequence[Factored], old_Q: Tensor, new_Q: Tensor) -> None:
        """With the mean of R in `new_Q`: set the state `old_Q`, and the factors whose product is the result."""

    def _check_codec(self) -> None:
        name = type(self).__name__
        check_codec(name, self.codec)
        if not isinstance(self.codec, Identity | Bf16):  # P has squares of singular values: too small for fp16
            raise ValueError(f"{name}: codec: expected 'identity' or 'bf16', got {self.codec.name!r}")

    @functools.cached_property
    def _layout(self) -> Layout:
        found: list[tuple[int, int, int, int, int]] = []
        rest: list[tuple[int, int]] = []
        start = 0
        for index, (n, m) in enumerate(self.shapes):
            if r := self.rank_of(n, m):
                found.append((n, r, m, start, index))
            elif rest and rest[-1][1] == start:
                rest[-1] = (rest[-1][0], start + n * m)
            else:
                rest.append((start, start + n * m))
            start += n * m
        matrices: list[Matrix] = []
        dense = left = right = 0
        for n, r, m, at, index in sorted(found):
            matrices.append(Matrix(at, n, m, r, dense, left, right, index))
            dense, left, right = dense + n * m, left + n * r, right + m * r
        return Layout(tuple(matrices), tuple(rest), dense, left, right, sum(b - a for a, b in rest))

    def init(self, x_N: Tensor, groups: Groups) -> State:
        """Random Q, the same on all ranks, and zeros for what is kept.

        Raises:
            ValueError: `x_N` does not hold matrices of these shapes.
        """
        layout, dtype, device = self._layout, _work_dtype(x_N.dtype), x_N.device
        self._check_numel(x_N.numel())
        if groups.size == 1 and not self.runs_alone:
            return {}
        if device.type == "cuda":
            _load_linalg(device)
        generator = torch.Generator().manual_seed(_SEED)
        drawn = torch.randn(layout.num_right, generator=generator, dtype=torch.float64, device="cpu")
        state = {"right": drawn.to(device, dtype)}
        if self.kept:
            state[self.kept] = torch.zeros(layout.num_dense, dtype=dtype, device=device)
        return state

    @property
    def num_means(self) -> int:
        """That of the left factors, and that of the right ones."""
        return 2

    def memory(self, state: State, n: int, lo: int, hi: int, groups: Groups) -> Sequence[Tensor]:
        """Right factors and what is kept of the matrices that the range meets, each whole."""
        found: list[Tensor] = []
        for each in self._layout.matrices if state else ():
            if each.start < hi and lo < each.start + each.n * each.m:
                found.append(state["right"][each.right : each.right + each.m * each.r])
                if self.kept:
                    found.append(state[self.kept][each.dense : each.dense + each.n * each.m])
        return found

    def reads(self, x_N: Tensor) -> bool:
        """Where matrices need not be converted."""
        same = x_N.device.type == "cpu" and x_N.dtype == _work_dtype(x_N.dtype)
        return same and (bool(self._layout.matrices) or not self.codec.lossless)

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
        buffers, layout = groups.buffers, self._layout
        if (groups.world.size == 1 and not self.runs_alone) or x_N.numel() == 0:
            return
        dtype, device, mean = _work_dtype(x_N.dtype), x_N.device, AllReduce(self.codec)
        p_P = buffers.get("left", (layout.num_left,), dtype, device)
        q_Q = buffers.get("right_and_rest", (layout.num_right + layout.num_rest,), dtype, device)
        rest = [x_N[start:stop] for start, stop in layout.rest]
        targets = [x_N[each.start : each.start + each.n * each.m].view(each.n, each.m) for each in layout.matrices]
        lefts, rights = _lefts(layout, p_P), _rights(layout, q_Q)
        factored: list[Factored] = []
        if targets:
            gradients = targets if source is None else _read(source, layout)
            matrices = self._take(gradients, state, groups)
            factored = list(map(Factored, layout.matrices, gradients, matrices, lefts, rights))
            for matrix, right, left in zip(matrices, _rights(layout, state["right"]), lefts, strict=True):
                torch.mm(matrix, right.t(), out=left)
            finite = device.type == "cpu" and bool(p_P.isfinite().all())
            mean.run(p_P, {}, groups, step)
            _orthonormalise_(layout, p_P)
            for matrix, left, right in zip(matrices, lefts, rights, strict=True):
                torch.mm(left.t(), matrix, out=right)
            self._keep(factored, state, finite and bool(p_P.isfinite().all()))
        _pack(q_Q[layout.num_right :], rest)
        mean.run(q_Q, {}, groups, step)
        _unpack(q_Q[layout.num_right :], rest)
        if targets:
            self._finish(factored, state["right"], q_Q[: layout.num_right])
        for target, left, right in zip(targets, lefts, rights, strict=True):
            if target.dtype == dtype:
                torch.mm(left, right, out=target)
            else:
                target.copy_(torch.mm(left, right, out=buffers.get("low_rank", tuple(target.shape), dtype, device)))

    def bytes_per_rank(self, n: int, size: int) -> float:
        """2 (R-1)/R times the encoded P, R and rest.

        Raises:
            ValueError: `n` is not the number of elements of all shapes.
        """
        self._check_numel(n)
        layout, mean = self._layout, AllReduce(self.codec)
        second = layout.num_right + layout.num_rest
        return mean.bytes_per_rank(layout.num_left, size) + mean.bytes_per_rank(second, size)

    def _check_numel(self, n: int) -> None:
        if n != sum(rows * columns for rows, columns in self.shapes):
            name = type(self).__name__
            raise ValueError(f"{name}: got {n} elements, which do not fill the shapes {list(self.shapes)}")

    def _take(self, targets: Sequence[Tensor], state: State, groups: Groups) -> list[Tensor]:
        """What is factored, in the work dtype: gradient plus what is kept (in the place of that), or the gradient."""
        layout, dtype = self._layout, state["right"].dtype
        if self.kept:
            matrices = _denses(layout, state[self.kept])
            for matrix, target in zip(matrices, targets, strict=True):
                matrix.add_(target)
            return matrices
        if targets[0].dtype == dtype:
            return list(targets)
        matrices = _denses(layout, groups.buffers.get("dense", (layout.num_dense,), dtype, targets[0].device))
        for matrix, target in zip(matrices, targets, strict=True):
            matrix.copy_(target)
        return matrices


def typical_bytes(exchange: Exchange, n: int, size: int) -> float:
    """Return the bytes that a rank sends, as if all `n` elements lay in matrices of the shape `TYPICAL`.

    Args:
        exchange: made for one such matrix.
    """
    typical = math.prod(TYPICAL)
    return exchange.bytes_per_rank(typical, size) / typical * n


def matrix_shape(param: Tensor) -> tuple[int, int]:
    """(n, m) of a parameter as it lies in its bucket: the outermost dimension in memory, and the others.

    Examples:
        >>> matrix_shape(torch.zeros(3, 5)), matrix_shape(torch.zeros(3, 5).t()), matrix_shape(torch.zeros(1, 4))
        ((3, 5), (3, 5), (1, 4))
    """
    sizes = list(_sizes_in_memory(param))
    return (sizes[0], math.prod(sizes[1:])) if len(sizes) > 1 else (1, math.prod(sizes))


def _sizes_in_memory(param: Tensor) -> Iterator[int]:
    """Sizes from the outermost dimension inwards, without those of one element. A transposed weight lies transposed."""
    for _, size in sorted(zip(param.stride(), param.size(), strict=True), key=lambda each: -each[0]):
        if size != 1:
            yield size


def _read(source: PayloadSource, layout: Layout) -> list[Tensor]:
    """The matrices of a payload, each where it lies."""
    found: list[Tensor] = []
    for each in layout.matrices:
        start, stop = each.start, each.start + each.n * each.m
        found.append(source.read(start, stop, source.x_N[start:stop]).view(each.n, each.m))
    return found


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _denses(layout: Layout, flat: Tensor) -> list[Tensor]:
    return [flat[each.dense : each.dense + each.n * each.m].view(each.n, each.m) for each in layout.matrices]


def _lefts(layout: Layout, flat: Tensor) -> list[Tensor]:
    return [flat[each.left : each.left + each.n * each.r].view(each.n, each.r) for each in layout.matrices]


def _rights(layout: Layout, flat: Tensor) -> list[Tensor]:
    # R^T: products whose result is [m, r] with few columns take ten times as long on a CPU.
    return [flat[each.right : each.right + each.m * each.r].view(each.r, each.m) for each in layout.matrices]


def _orthonormalise_(layout: Layout, p_P: Tensor) -> None:
    """Make the columns of each left factor orthonormal; factors of one shape in one call.

    Rows of zeros stay zero, since optimizers such as Adam make whole steps of rounding errors. A factor of zeros gets
    unit vectors, or no gradient would ever pass again.
    """
    for (n, r), same in groupby(layout.matrices, key=lambda each: (each.n, each.r)):
        group = list(same)
        start = group[0].left
        factors = p_P[start : start + len(group) * n * r].view(len(group), n, r)
        unused = (factors == 0).all(dim=2, keepdim=True)
        unused &= ~unused.all(dim=1, keepdim=True)
        if factors.device.type != "cpu":  # QR on a GPU adds up squares as they are, LAPACK scales them
            factors.mul_(inverse_size(torch.linalg.vector_norm(factors, math.inf, dim=(1, 2), keepdim=True)))
        factors.copy_(torch.linalg.qr(factors).Q).masked_fill_(unused, 0)


def inverse_size(norms: Tensor) -> Tensor:
    """Return powers of two that bring numbers of these sizes to [0.5, 1); 1 for zero and what is not finite.

    Products with them are exact, but for those that become subnormal. Sizes that are subnormal, or 2^127 and above,
    end nearby: the factor has to be a normal number.
    """
    limits = torch.finfo(norms.dtype)
    powers = (torch.frexp(norms).mantissa / norms).clamp_(limits.tiny, 1 / limits.tiny)
    return torch.where((norms > 0) & norms.isfinite(), powers, 1.0)


@functools.cache
def _load_linalg(device: torch.device) -> None:
    """Have torch load its linear algebra for GPUs: the first call of it fails if another thread makes one too."""
    with _LOADING:
        torch.linalg.qr(torch.eye(2, dtype=torch.float32, device=device))


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
