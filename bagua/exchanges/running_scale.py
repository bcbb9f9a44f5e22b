"""Scales of elements from the magnitudes of earlier results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bagua.codecs import backends
from bagua.codecs.kernels import SCALE_FLOOR as _FLOOR
from bagua.codecs.kernels import SCALE_WINDOW as WINDOW
from bagua.comm.buffers import Buffers

__all__ = [
    "WINDOW",
    "divide_by_scale",
    "floors_of_windows",
    "scale_from_floors",
    "scale_from_magnitude",
    "update_magnitude",
    "window_sums",
]

_DECAY_LEFT = 0.01  # 1 - the decay of a step
_HALF_OF_ONE = 0x3F800000 >> 1  # of the bits of 1.0
_MOST = 1e30  # sums of a window stay finite in fp32


def divide_by_scale(magnitude_N: Tensor, x_N: Tensor, buffers: Buffers) -> Callable[[], None]:
    """Divide each element by its scale, in place; in compiled code where there is some, with the same bits.

    Shapes: both [N] fp32, N >= 1.

    Returns:
        What multiplies `x_N` by the scales again, in place, and counts the result in `magnitude_N`.
    """
    kernels, dtype, device = backends.kernels(x_N.device).running_scale, torch.float32, x_N.device
    if kernels is not None:
        means_K = buffers.get("scale", (-(-x_N.numel() // WINDOW),), dtype, device)
        kernels.divide(magnitude_N, means_K, x_N)
        return partial(kernels.multiply, magnitude_N, means_K, x_N)
    scale_N = scale_from_magnitude(magnitude_N, buffers.get("scale", (x_N.numel(),), dtype, device))
    x_N.div_(scale_N)
    return lambda: update_magnitude(magnitude_N, x_N.mul_(scale_N), scale_N)


def scale_from_magnitude(magnitude_N: Tensor, out: Tensor) -> Tensor:
    """Write the scale of each element: the root of its magnitude plus a tenth of the mean magnitude around it.

    The tenth bounds the scale of an element that was zero so far. Elements around it are those of a window of 256. The
    largest window stands for a window of zeros, and one for each element if all are zero.

    Every rank must get the same bits, whatever its processor. So sums are taken in a fixed order, no operation is fused
    with another, and the root halves the bits of the number, which makes it up to 6 % too large: square roots of math
    libraries may differ in the last bit.

    Shapes: magnitude_N: [N] fp32, N >= 1, from `update_magnitude`; out, result: like it.
    """
    return scale_from_floors(magnitude_N, floors_of_windows(magnitude_N), out)


def floors_of_windows(magnitude_N: Tensor) -> Tensor:
    """Return what `scale_from_magnitude` adds to the magnitudes of each window.

    Shapes: magnitude_N: [N] fp32, N >= 1; result: [K], K = N / 256, rounded up.
    """
    rest = magnitude_N.numel() % WINDOW
    means_K = window_sums(magnitude_N)
    if rest:
        means_K[-1] *= WINDOW / rest
    means_K *= _FLOOR / WINDOW
    most = means_K.amax()
    return torch.where(means_K > 0, means_K, torch.where(most > 0, most, 1.0))


def scale_from_floors(magnitude_N: Tensor, floors_K: Tensor, out: Tensor) -> Tensor:
    """`scale_from_magnitude` of whole windows, whose floors are those of more windows.

    Shapes: magnitude_N, out, result: [N] fp32; floors_K: [K], K = N / 256, rounded up.
    """
    n = magnitude_N.numel()
    whole = n // WINDOW * WINDOW
    floors_K1 = floors_K[: whole // WINDOW, None]
    torch.add(magnitude_N[:whole].view(-1, WINDOW), floors_K1, out=out[:whole].view(-1, WINDOW))
    if whole < n:
        torch.add(magnitude_N[whole:], floors_K[-1], out=out[whole:])
    out.view(torch.int32).bitwise_right_shift_(1).add_(_HALF_OF_ONE)
    return out


def window_sums(x_N: Tensor) -> Tensor:
    """Return the sums of windows of 256 elements, the last one maybe of fewer, taken in a fixed order.

    Shapes: x_N: [N], N >= 1; result: [K], K = N / 256, rounded up.
    """
    whole = x_N.numel() // WINDOW * WINDOW
    parts = [x_N[:whole].view(-1, WINDOW)] if whole else []
    if whole < x_N.numel():
        parts.append(torch.nn.functional.pad(x_N[whole:], (0, WINDOW - x_N.numel() + whole))[None])
    return torch.cat([_fold(part_KB) for part_KB in parts])


def update_magnitude(magnitude_N: Tensor, x_N: Tensor, scratch_N: Tensor) -> None:
    """Move the running mean of |x| by a hundredth of the way; where `x_N` is not finite, it stays.

    Shapes: all [N] fp32. `scratch_N` is overwritten.
    """
    torch.abs(x_N, out=scratch_N).sub_(magnitude_N).mul_(_DECAY_LEFT)
    magnitude_N.add_(scratch_N.nan_to_num_(nan=0.0, posinf=0.0)).clamp_(max=_MOST)


def _fold(x_KB: Tensor) -> Tensor:
    """Sums of the rows, halves added to halves."""
    while x_KB.shape[1] > 1:
        half = x_KB.shape[1] // 2
        x_KB = x_KB[:, :half] + x_KB[:, half:]
    return x_KB[:, 0]
