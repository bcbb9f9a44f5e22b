"""Optimizers for the momentum algorithms, and `fuse`, which speeds up any element-wise optimizer."""

from __future__ import annotations

from bagua.optim.fused import NotElementwiseError, fuse
from bagua.optim.one_bit_lamb import OneBitLamb
from bagua.optim.qadam import QAdam
from bagua.optim.two_stage import TwoStage
from bagua.optim.unfixed import unfix_second_moments
from bagua.optim.warmed import WarmedUp
from bagua.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "NotElementwiseError",
    "OneBitLamb",
    "QAdam",
    "TwoStage",
    "WarmedUp",
    "ZeroOneAdam",
    "fuse",
    "unfix_second_moments",
]
