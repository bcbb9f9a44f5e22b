"""Optimizers whose state lets the workers send little; each is made for the algorithm of the same name."""

from __future__ import annotations

from bagua.optim.one_bit_lamb import OneBitLamb
from bagua.optim.qadam import QAdam
from bagua.optim.two_stage import TwoStage
from bagua.optim.zero_one_adam import ZeroOneAdam

__all__ = ["OneBitLamb", "QAdam", "TwoStage", "ZeroOneAdam"]
