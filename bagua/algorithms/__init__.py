"""What is exchanged, how, and when: one algorithm a file."""

from __future__ import annotations

from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness, Payload
from bagua.algorithms.bytegrad import ByteGrad
from bagua.algorithms.gradient_allreduce import GradientAllReduce
from bagua.algorithms.registry import Available, available, get, register

__all__ = [
    "Algorithm",
    "Available",
    "Bucket",
    "ByteGrad",
    "Context",
    "Exactness",
    "GradientAllReduce",
    "Payload",
    "available",
    "get",
    "register",
]
