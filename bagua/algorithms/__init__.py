"""Algorithms: what the ranks exchange, how and when. One algorithm per file."""

from __future__ import annotations

from bagua.algorithms.async_model_average import AsyncModelAverage
from bagua.algorithms.auto import Auto
from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness, LostStep, Payload
from bagua.algorithms.bytegrad import ByteGrad
from bagua.algorithms.decentralized import Decentralized
from bagua.algorithms.diloco import DiLoCo
from bagua.algorithms.gradient_allreduce import GradientAllReduce
from bagua.algorithms.local_sgd import LocalSGD
from bagua.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from bagua.algorithms.one_bit_lamb import OneBitLamb
from bagua.algorithms.power_sgd import PowerSGD
from bagua.algorithms.qadam import QAdam
from bagua.algorithms.registry import Available, available, get, register
from bagua.algorithms.sparse_loco import SparseLoCo
from bagua.algorithms.warmup import Warmup
from bagua.algorithms.zero_one_adam import ZeroOneAdam

__all__ = [
    "Algorithm",
    "AsyncModelAverage",
    "Auto",
    "Available",
    "Bucket",
    "ByteGrad",
    "Context",
    "Decentralized",
    "DiLoCo",
    "Exactness",
    "GradientAllReduce",
    "LocalSGD",
    "LostStep",
    "LowPrecisionDecentralized",
    "OneBitLamb",
    "Payload",
    "PowerSGD",
    "QAdam",
    "SparseLoCo",
    "Warmup",
    "ZeroOneAdam",
    "available",
    "get",
    "register",
]
