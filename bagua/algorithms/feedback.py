"""Defaults of `error_feedback` and `running_scale`, depending on the codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.codecs import Codec

__all__ = ["fit_feedback", "fit_momentum_feedback", "fit_running_scale", "helps_sgd"]

_MANY = 1 << 20


def fit_feedback(wanted: bool | None, codec: Codec) -> bool:
    """Resolve `error_feedback`: None becomes true for a biased codec that is coarse.

    Such codecs do not converge without it; with 8 bits it costs memory and gains almost nothing. An unbiased codec
    needs none: its errors average out. With SGD it is better with feedback nevertheless: see `helps_sgd`.
    """
    if wanted is not None:
        return wanted
    return not (codec.linear or codec.lossless or codec.unbiased) and _is_coarse(codec)


def _is_coarse(codec: Codec) -> bool:
    """Whether it has less than 8 bits per fp32 element, or leaves elements out, however many bytes the others take."""
    return codec.drops or codec.wire_bytes(_MANY) < _MANY


def helps_sgd(codec: Codec, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether error feedback is on by default with an unbiased codec: with less than 8 bits if all optimizers are SGD.

    SGD averages the errors over its steps, and feedback takes them back. An Adam would find the noise of feedback in
    its second moments (docs/codec-measurements.md has both).
    """
    small = codec.unbiased and not codec.lossless and _is_coarse(codec)
    return small and bool(optimizers) and all(isinstance(each, torch.optim.SGD) for each in optimizers)


def fit_momentum_feedback(wanted: bool | None, codec: Codec) -> bool:
    """Resolve `error_feedback` of momenta: None becomes true for a coarse codec, unbiased ones included.

    A momentum that was quantised is quantised again in the next step. The error of an unbiased codec is uncorrelated
    with what it encodes and adds to its square: with 1 bit of `eden` the square grows by 1.57 b1^2 in each step, which
    is more than 1 for the usual b1. Feedback takes errors back instead.
    """
    if wanted is not None:
        return wanted
    return not (codec.linear or codec.lossless) and _is_coarse(codec)


def fit_running_scale(wanted: bool | None, codec: Codec, feedback: bool) -> bool:
    """Resolve `running_scale`: None becomes true for an unbiased codec, unless errors are fed back."""
    return codec.unbiased and not feedback if wanted is None else wanted
