"""The arithmetic that takes the noise of a codec out of second moments; compiled where there is such code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bagua.codecs import backends
from bagua.codecs.kernels import Moments
from bagua.exchanges.running_scale import (
    WINDOW,
    floors_of_windows,
    scale_from_floors,
    update_magnitude,
    window_sums,
)

__all__ = ["subtract_noise"]

_CHUNK = 1 << 17  # elements, whole windows: what eager code does on a CPU with as many stays in a core's cache


@torch.no_grad()
def subtract_noise(g_N: Tensor, magnitude_N: Tensor | None, share: float, moments: Sequence[Moments]) -> None:
    """Take the noise in the gradients of a bucket out of second moments, and count the gradients in the magnitudes.

    The formula is that of `denoise_second_moments`. Compiled code takes it in one pass if all is fp32 and lies on the
    CPU, and first and second moments have the order of the bucket. It gives the same bits.

    Args:
        g_N: [N] the gradients, N >= 1.
        magnitude_N: [N] fp32, of `update_magnitude`; None: there is no running scale.
        share: of the square that is noise.
        moments: of the parameters that are to be corrected, in the order of their parts of `g_N`.
    """
    moments = [each for each in moments if each.part.numel()]
    kernel = backends.kernels(g_N.device).denoise
    if kernel is not None and _fits(g_N, magnitude_N, moments):
        kernel(g_N, magnitude_N, share, moments)
        return
    noise_N = _noise(g_N, magnitude_N, share)
    for each in moments:
        begin = each.part.storage_offset() - g_N.storage_offset()
        if _in_order(each):
            n, line = each.part.numel(), (1,)
            v_M, m_M = each.second.as_strided((n,), line), each.first.as_strided((n,), line)
            for lo, hi in _chunks(n, g_N.device):
                _correct(v_M[lo:hi], m_M[lo:hi], noise_N[begin + lo : begin + hi], each)
        else:
            noise = noise_N.as_strided(each.part.shape, each.part.stride(), begin)
            _correct(each.second, each.first, noise, each)


def _fits(g_N: Tensor, magnitude_N: Tensor | None, moments: Sequence[Moments]) -> bool:
    """Whether the compiled code can do it."""
    tensors = [tensor for each in moments for tensor in (each.first, each.second)]
    tensors += [g_N] if magnitude_N is None else [g_N, magnitude_N]
    plain = all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    return plain and g_N.is_contiguous() and all(map(_in_order, moments))


def _in_order(moments: Moments) -> bool:
    """Whether the elements of both lie as those of the bucket, which are dense."""
    part = moments.part
    return all(
        mine == its or size == 1
        for each in (moments.first, moments.second)
        for mine, its, size in zip(each.stride(), part.stride(), part.shape, strict=True)
    )


def _chunks(n: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges that cover `n` elements: one, except on a CPU."""
    size = _CHUNK if device.type == "cpu" else n
    for lo in range(0, n, size):
        yield lo, min(lo + size, n)


def _correct(v: Tensor, m: Tensor, noise: Tensor, moments: Moments) -> None:
    floor = m.square().mul_(moments.floor)
    torch.minimum(floor, v, out=floor)
    less = v - noise.to(v.dtype) * moments.decay_left
    v.copy_(torch.where(less.isnan(), v, torch.maximum(less, floor)))  # as it is where squares have overflowed


def _noise(g_N: Tensor, magnitude_N: Tensor | None, share: float) -> Tensor:
    """n, [N] fp32, zero where g is: rows that nobody uses are cleared. Counts g in the magnitudes."""
    noise_N = torch.empty_like(g_N, dtype=torch.float32)
    floors_K = None if magnitude_N is None else floors_of_windows(magnitude_N)
    for lo, hi in _chunks(g_N.numel(), g_N.device):
        g_C, noise_C = g_N[lo:hi].float(), noise_N[lo:hi]
        if magnitude_N is None or floors_K is None:
            noise_C.copy_(_means(g_C * g_C)).mul_(share).masked_fill_(g_C == 0, 0)
            continue
        magnitude_C, floors_C = magnitude_N[lo:hi], floors_K[lo // WINDOW : -(-hi // WINDOW)]
        scale_C = scale_from_floors(magnitude_C, floors_C, torch.empty_like(magnitude_C))
        y_C = g_C / scale_C
        noise_C.copy_(_means(y_C.mul_(y_C))).mul_(share).mul_(scale_C).mul_(scale_C).masked_fill_(g_C == 0, 0)
        update_magnitude(magnitude_C, g_C, scale_C)
    return noise_N


def _means(x_C: Tensor) -> Tensor:
    """For each element the mean of its window: [C]."""
    sums_K, n = window_sums(x_C), x_C.numel()
    sums_K /= WINDOW
    if n % WINDOW:
        sums_K[-1] *= WINDOW / (n % WINDOW)
    return sums_K.repeat_interleave(WINDOW)[:n]
