"""A bucket: one flat tensor and the parameters whose gradients (or weights) are views of it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Payload
from bagua.exchanges import ElementwiseHook, PayloadSource, Piece
from bagua.held import hold

__all__ = ["Bucket", "part_ranges", "raise_moved"]


_LEAST_PIECE = 1 << 18  # elements; smaller gradients are copied in one go: reading each costs calls


class Bucket:
    """One flat tensor for the payload of several parameters of one dtype.

    Attributes:
        index: position in the order of exchange.
        names, params: what lies in it, in order.
        views: for each parameter, its part of `flat`, in the parameter's shape and, where that is dense, strides.
        numel: N, the sum of the parameters' elements; no padding.
    """

    def __init__(
        self, index: int, names: Sequence[str], params: Sequence[torch.nn.Parameter], payload: Payload
    ) -> None:
        self.index = index
        self.names = tuple(names)
        self.params = tuple(params)
        first = self.params[0]
        self.numel = sum(param.numel() for param in self.params)
        self._flat = torch.zeros(self.numel, dtype=first.dtype, device=first.device)
        hold(self._flat)
        self._away: dict[int, Tensor] = {}  # gradients that are not in `_flat` yet, by position
        # autograd gives gradients the strides of a dense parameter; equal strides make the copy a plain one
        self._strides = [param.stride() if _is_dense(param) else None for param in self.params]
        self.views = self.split(self._flat)
        self._addresses = [view.data_ptr() for view in self.views]
        if payload is Payload.PARAM:
            with torch.no_grad():
                for param, view in zip(self.params, self.views, strict=True):
                    view.copy_(param)
                    param.data = view

    @property
    def flat(self) -> Tensor:
        """[N] the payload; gradients that are still elsewhere are copied first."""
        self.bring()
        return self._flat

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return self.numel * self._flat.element_size()

    def parts(self, part_bytes: int) -> tuple[tuple[int, int], ...]:
        """Ranges of `flat` of about `part_bytes` bytes each, as equal as can be."""
        return part_ranges(self.numel, self._flat.element_size(), part_bytes)

    def split(self, flat: Tensor, only: Collection[nn.Parameter] | None = None) -> list[Tensor]:
        """Each parameter's part of `flat`, in the parameter's shape and, where that was dense, strides.

        Autograd does not know them as views of `flat`, so that `.grad.detach_()` works, as in zero_grad of old scripts.

        Args:
            flat: [N], or [M] with the elements of `only`, in the order of the bucket.
            only: parameters of the bucket; None: all.
        """
        views: list[Tensor] = []
        offset, wanted = 0, set(self.params if only is None else only)
        for param, strides in zip(self.params, self._strides, strict=True):
            if param not in wanted:
                continue
            part = flat[offset : offset + param.numel()]
            view = part.view(param.size()) if strides is None else part.as_strided(param.size(), strides)
            views.append(view.detach())
            offset += param.numel()
        return views

    def describe(self) -> str:
        """For messages: the index and the first and last names."""
        names = self.names[0] if len(self.names) == 1 else f"{self.names[0]} ... {self.names[-1]}"
        return f"bucket {self.index} ({names})"

    def gather(self) -> list[int]:
        """Record which gradients autograd allocated outside the bucket, as after `zero_grad(set_to_none=True)`.

        They are not copied before they are needed: an exchange may read them where they are (`take`). A sparse
        gradient becomes dense: that of a weight which is not only an embedding's, or which no module declares sparse.

        Returns:
            The parameters without a gradient, by position; they count as zero.
        """
        self.bring()
        without: list[int] = []
        for position, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            if grad is None:
                view.zero_()  # it holds the mean of an earlier pass
                without.append(position)
            elif grad is not view:
                self._away[position] = grad if grad.layout is torch.strided else grad.to_dense()
        return without

    @property
    def away(self) -> Mapping[int, Tensor]:
        """The gradients that `gather` noted and nobody has copied yet, by position."""
        return self._away

    def bring(self) -> None:
        """Copy what `gather` left elsewhere, and make `.grad` the view again.

        One copy for the whole bucket costs far less than one for each tensor.
        """
        if self._away:
            with torch.no_grad():
                torch._foreach_copy_([self.views[position] for position in self._away], list(self._away.values()))
            self._come_home()

    def _come_home(self) -> None:
        for position in self._away:
            self.params[position].grad = self.views[position]
        self._away.clear()

    @torch.no_grad()
    def take(self, hook: ElementwiseHook | None) -> PayloadSource | None:
        """Pass what `gather` left elsewhere to an exchange; None if copying is better, or nothing is left.

        Until that exchange has run, `flat`, and so `.grad`, holds old values.
        """
        small = self.numel < _LEAST_PIECE * len(self.params)
        if small or self._flat.device.type != "cpu" or (hook is None and not self._away):
            return None
        pieces: list[Piece] = []
        at, home = 0, self._flat
        for position, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            lo, at = at, at + param.numel()
            if lo == at:
                continue
            grad = self._away.get(position)
            if grad is not None and not _alike(grad, view):
                view.copy_(grad)
                grad = None
            x = home[lo:at] if grad is None else grad.detach().as_strided((at - lo,), (1,))
            pieces.append(Piece(lo, at, x, position))
        self._come_home()
        return PayloadSource(home, pieces, hook)

    def check_home(self, turn: int, payload: Payload) -> None:
        """See whether the parameters still belong to the bucket.

        All of them, where weights are exchanged: those in other storage would be left out. Gradients only need the
        parameters' type and device; one parameter, each in its turn, stands for all, since `module.to()` moves all.
        Gradients that were given other storage, as by `module.to("cpu:0")`, are copied back into the bucket.

        Raises:
            RuntimeError: something like `module.to()` gave a parameter other storage, type or device.
        """
        if payload is Payload.PARAM:
            addresses = list(map(Tensor.data_ptr, self.params))
            if addresses != self._addresses:
                moved = map(operator.ne, addresses, self._addresses)
                raise_moved(next(name for name, other in zip(self.names, moved, strict=True) if other))
            return
        index = turn % len(self.params)
        param = self.params[index]
        if param.dtype is not self._flat.dtype or param.device != self._flat.device:
            raise_moved(self.names[index])
        if list(map(Tensor.data_ptr, self.views)) != self._addresses:
            self._fetch_views()

    @torch.no_grad()
    def _fetch_views(self) -> None:
        """Give views the storage in `_flat` again; the objects stay, since `.grad` and the reducer refer to them.

        `module.to()` assigns to `.grad.data` and so moves the view itself.
        """
        for name, view, place in zip(self.names, self.views, self.split(self._flat), strict=True):
            if view.dtype is not place.dtype or view.device != place.device:
                raise_moved(name)
            if view.data_ptr() != place.data_ptr():
                place.copy_(view)
                view.data = place

    def release(self, payload: Payload) -> None:
        """Give the parameters their values (or gradients) back in storage of their own."""
        with torch.no_grad():
            for param, view in zip(self.params, self.views, strict=True):
                if payload is Payload.PARAM and param.data_ptr() == view.data_ptr():
                    param.data = view.clone(memory_format=torch.preserve_format)
                elif payload is Payload.GRAD and param.grad is view:
                    param.grad = view.clone(memory_format=torch.preserve_format)


def _alike(grad: Tensor, view: Tensor) -> bool:
    """Whether the elements of both lie in the same order and without gaps, in one type."""
    same = all(a == b or n == 1 for a, b, n in zip(grad.stride(), view.stride(), view.shape, strict=True))
    return same and grad.dtype is view.dtype and grad.device == view.device and _is_dense(view)


def part_ranges(numel: int, element_bytes: int, part_bytes: int) -> tuple[tuple[int, int], ...]:
    """Ranges of `numel` elements of about `part_bytes` bytes each, as equal as can be."""
    aligned = 4096
    count = max(1, round(numel * element_bytes / part_bytes))
    step = max(aligned, -(-numel // (count * aligned)) * aligned)
    return tuple((lo, min(lo + step, numel)) for lo in range(0, max(numel, 1), step))


def raise_moved(name: str) -> NoReturn:
    """Refuse to continue with a parameter that has left its place.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"parameter {name!r} was converted, moved or given other storage after bagua.distribute() (module.to(), "
        ".half(), .cuda(), an assignment to .data); call bagua.distribute() again on all ranks"
    )


def _is_dense(param: Tensor) -> bool:
    """Whether the parameter's elements fill a range of memory without overlap, in some order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return param.numel() > 0
