"""The original's search for good settings: its names, which say what there is instead."""

from __future__ import annotations

from bagua.gone import Gone
from bagua.service import INSTEAD

__all__ = ["BayesianOptimizer", "BoolParam", "FloatParam", "IntParam"]

BayesianOptimizer = Gone("bagua.service.bayesian_optimizer.BayesianOptimizer", INSTEAD)
BoolParam = Gone("bagua.service.bayesian_optimizer.BoolParam", INSTEAD)
FloatParam = Gone("bagua.service.bayesian_optimizer.FloatParam", INSTEAD)
IntParam = Gone("bagua.service.bayesian_optimizer.IntParam", INSTEAD)
