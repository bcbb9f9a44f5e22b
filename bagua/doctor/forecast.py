"""What `algorithm="auto"` would choose over the measured links: its own rules, fed with predicted times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua.algorithms.auto import Auto
from bagua.auto.candidates import allowed
from bagua.auto.facts import Facts, StepTimes
from bagua.auto.judge import Judge, Outcome
from bagua.auto.links import Links
from bagua.plan import CPU, GPU, Workload, load_model, predict

__all__ = ["Forecast", "forecast"]


@dataclass(frozen=True)
class Forecast:
    """A choice that is predicted, not measured.

    Attributes:
        optimizer: family, "sgd" or "adam".
        chosen: algorithm with options.
        step_s: seconds of a step with it.
        exact_s: seconds of a step in full precision.
    """

    optimizer: str
    chosen: str
    step_s: float
    exact_s: float


def forecast(
    model: str, compute_s: float, links: Links, nodes: Sequence[Sequence[int]], cores: float, gpu: bool
) -> list[Forecast]:
    """Predict the choice of "auto" with `allow="lossy"`, for each family of optimizers.

    Args:
        model: as `bagua plan --model` takes it.
        compute_s: forward and backward pass of a step.
        links: as measured.
        nodes: ranks by node.
        cores: of the CPU that a rank has.
        gpu: ranks train on GPUs.
    """
    layers = load_model(model).layers
    shapes = {f"{layer.name}.{k}": shape for layer in layers for k, shape in enumerate(layer.shapes)}
    known = tuple(tuple(node) for node in nodes)
    auto = Auto()
    candidates = tuple(allowed(auto.allow, known))
    found = []
    for family in ("sgd", "adam"):
        facts = Facts(auto, known, candidates, links, shapes, (family,), cores, gpu)
        times = _step_times(facts, compute_s)
        judge = Judge(facts)
        order = judge.begin()
        while order.count:
            step_s = times[order.candidate]
            step = StepTimes(step_s, max(step_s - compute_s, 0.0), compute_s / 3, 0.0)
            order = judge.next(Outcome([[step] * order.count], 0))
        found.append(Forecast(family, candidates[order.candidate].name, times[order.candidate], times[0]))
    return found


def _step_times(facts: Facts, compute_s: float) -> list[float]:
    workload, costs = Workload.of(facts.model, compute_s), GPU if facts.gpu else CPU
    return [predict(each.name, workload, facts.cluster, costs).step_s for each in facts.candidates]
