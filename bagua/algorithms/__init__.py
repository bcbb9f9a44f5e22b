"""What is exchanged, how, and when: one algorithm a file."""

from __future__ import annotations

from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness, Payload
from bagua.algorithms.bytegrad import ByteGrad
from bagua.algorithms.decentralized import Decentralized
from bagua.algorithms.gradient_allreduce import GradientAllReduce
from bagua.algorithms.local_sgd import LocalSGD
from bagua.algorithms.low_precision_decentralized import LowPrecisionDecentralized
from bagua.algorithms.registry import Available, available, get, register
from bagua.algorithms.warmup import Warmup

__all__ = [
    "Algorithm",
    "Available",
    "Bucket",
    "ByteGrad",
    "Context",
    "Decentralized",
    "Exactness",
    "GradientAllReduce",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "Payload",
    "Warmup",
    "available",
    "get",
    "register",
]
