"""Plans: the time of a training step on a cluster that is not yet bought, for every algorithm."""

from __future__ import annotations

from bagua.plan.cluster import CPU, GPU, Cluster, Costs
from bagua.plan.prediction import Prediction, predict
from bagua.plan.workload import Workload, load_model

__all__ = ["CPU", "GPU", "Cluster", "Costs", "Prediction", "Workload", "load_model", "predict"]
