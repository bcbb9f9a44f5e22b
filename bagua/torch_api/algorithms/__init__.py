"""The original's algorithms, under its names and with its arguments."""

from __future__ import annotations

from bagua.torch_api.algorithms import async_model_average, bytegrad, decentralized, gradient_allreduce, q_adam
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "async_model_average",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "q_adam",
]
