"""The time of a step on four hosts with links of 100 Mbit/s, by the simulation of `bagua plan`.

It is a prediction, not a measurement. It has the algorithm, the options and the model of the run whose loss it stands
beside. It counts only if the bytes that it predicts are those that the run has sent.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache

import torch

import bagua
from bagua.plan import Cluster, Prediction, Workload, load_model, predict
from benchmarks.convergence.configurations import Configuration
from benchmarks.convergence.suite.rows import BASELINE
from benchmarks.convergence.suite.tasks import model_spec
from benchmarks.convergence.tasks import RANKS

__all__ = ["AGREEMENT", "CLUSTER", "COMPUTE_MS", "contender_of", "step_ms"]

COMPUTE_MS = 5.0  # of a step, forward and backward pass
CLUSTER = Cluster(hosts=RANKS, bandwidth=100e6, cores=2.0)
AGREEMENT = 0.1  # of predicted and sent bytes
_TWO_STAGES = ("qadam", "zero_one_adam", "one_bit_lamb")  # a part of their steps is exact


def contender_of(configuration: Configuration) -> str:
    """Return the algorithm with all its options as `bagua plan` names it, so that no default of a contender counts."""
    algorithm = bagua.algorithms.get(configuration.algorithm, **configuration.options)
    if configuration.family == "sgd":
        algorithm = algorithm.for_optimizers([torch.optim.SGD([torch.zeros(1)], lr=1.0)])
    options = {field.name: getattr(algorithm, field.name) for field in fields(algorithm) if field.init}
    return f"{configuration.algorithm}:" + ",".join(f"{key}={value}" for key, value in options.items())


@lru_cache(maxsize=1024)
def _predicted(contender: str, task: str) -> Prediction | None:
    workload = Workload.of(load_model(model_spec(task)), COMPUTE_MS / 1e3)
    try:
        return predict(contender, workload, CLUSTER)
    except ValueError:  # its course is not known
        return None


def step_ms(configuration: Configuration, task: str, bytes_per_step: float) -> float | None:
    """Return the mean milliseconds of a step of a whole run; None if no prediction fits it.

    A run that begins with exact steps is a mean of both kinds of steps. For optimizers with two stages the share of
    exact steps is the one that gives the bytes sent.

    Args:
        configuration: of the run.
        task: whose model is trained.
        bytes_per_step: that a rank has sent in the run, mean over the steps.
    """
    if not configuration.algorithm:
        return None
    exact, own = (_predicted(name, task) for name in (BASELINE, contender_of(configuration)))
    if exact is None or own is None or configuration.processes:
        return None
    share = configuration.warmup
    if configuration.algorithm in _TWO_STAGES:
        share = (bytes_per_step - own.bytes_per_host) / (exact.bytes_per_host - own.bytes_per_host)
        if not -AGREEMENT <= share <= 1 + AGREEMENT:
            return None
    elif abs(share * exact.bytes_per_host + (1 - share) * own.bytes_per_host - bytes_per_step) > (
        AGREEMENT * bytes_per_step
    ):
        return None
    share = min(max(share, 0.0), 1.0)
    return 1e3 * (share * exact.step_s + (1 - share) * own.step_s)
