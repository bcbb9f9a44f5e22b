"""The original's algorithms, under its names and with its arguments."""

from __future__ import annotations

from bagua.torch_api.algorithms import bytegrad, decentralized, gradient_allreduce
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry

__all__ = ["Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry", "bytegrad", "decentralized", "gradient_allreduce"]
