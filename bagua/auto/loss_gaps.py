"""How much worse than `DistributedDataParallel` settings learn, as measured, by family of the optimizer.

The figures come from two benchmarks with 4 ranks, the same optimizer, data, learning rates and number of steps as DDP.
One has two small tasks and 3 seeds (`SOURCE`). The other is the convergence suite: four tasks, whose seeds defaults
were not chosen on (`SUITE`). Of the suite the worse of the two tasks of a family is in the table. `power_sgd` has the
worse of rank 4 and rank by shape. `diloco` every 16 steps has at least the gap of every 8, which was run on more tasks.

Eden is the row with its defaults: error feedback with SGD, second moments without the codec's noise with Adam. Gossip
with Adam corrects second moments, as it does by default. "Short rounds" are the defaults of `local_sgd` and `diloco`.
A test compares the table with those files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["FAMILIES", "MEASURED", "POINTS_PER_LOSS", "SOURCE", "SUITE", "Gap", "families_of", "gap_of"]

SOURCE = "benchmarks/results/2026-11-27-convergence/results.json"
SUITE = "benchmarks/results/2026-11-23-suite/suite.json"
FAMILIES = ("sgd", "adam")
# The targets of that benchmark are 2 % of loss and half a point of accuracy, 4 % and a point.
POINTS_PER_LOSS = 25.0
_SGD = ("SGD", "ASGD")
_ADAM = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adafactor", "Adadelta", "SparseAdam")


@dataclass(frozen=True)
class Gap:
    """What a setting loses in a short training.

    Attributes:
        loss_percent: loss on text above DDP's, in percent of it.
        points: accuracy on digits behind DDP's, in points.
        suite_percent: loss on the worse task of the convergence suite above DDP's, in percent of it. None: not in it.
    """

    loss_percent: float
    points: float
    suite_percent: float | None = None

    @property
    def fraction(self) -> float:
        """The worst of them as a fraction of the loss, at least 0; a point of accuracy counts as 4 %.

        Examples:
            >>> from bagua.auto.loss_gaps import Gap
            >>> Gap(loss_percent=0.5, points=0.25).fraction
            0.01
        """
        return max(self.loss_percent / 100, self.points / POINTS_PER_LOSS, (self.suite_percent or 0.0) / 100, 0.0)


# By the row of the benchmark, then by the family.
MEASURED: Mapping[str, Mapping[str, Gap]] = {
    "gradient_allreduce": {"sgd": Gap(0.0, 0.0), "adam": Gap(0.0, 0.0)},
    "gradient_allreduce bf16": {"sgd": Gap(-0.0007, -0.1113), "adam": Gap(-0.0003, 0.0)},
    "bytegrad": {"sgd": Gap(0.0012, -0.0557, 0.2698), "adam": Gap(0.0083, 0.0, -0.0246)},
    "bytegrad int4 + feedback": {"sgd": Gap(-0.0055, -0.1113, 1.1489), "adam": Gap(0.6055, 0.1113, 3.3328)},
    "bytegrad sign + feedback": {"sgd": Gap(10.1312, 9.7941, 627.01)},
    "bytegrad top_k + feedback": {"sgd": Gap(8.7686, 7.8464)},
    "bytegrad eden 4 bits": {"sgd": Gap(0.0039, 0.0, 0.0587), "adam": Gap(0.1443, -0.1669, -0.1971)},
    "bytegrad eden 2 bits": {"sgd": Gap(-0.0007, -0.3895, 0.5453), "adam": Gap(-0.3433, 0.0556, 0.9123)},
    "bytegrad eden 1 bit": {"sgd": Gap(-0.0507, -0.1669, 0.7025), "adam": Gap(0.2665, 0.946, 8.7388)},
    "power_sgd": {"sgd": Gap(1.558, 0.1113, 3.0377), "adam": Gap(5.8556, 1.113, 5.7564)},
    "local_sgd": {"sgd": Gap(0.4366, 0.2782, 11.9124), "adam": Gap(4.682, 1.5582, 37.273)},
    "diloco": {"sgd": Gap(-2.135, -0.2226, 11.6409), "adam": Gap(3.3159, 0.5008, 18.9613)},
    "local_sgd short rounds": {"sgd": Gap(0.0498, -0.2226, 1.1713), "adam": Gap(1.307, 0.0557, 2.383)},
    "diloco short rounds": {"sgd": Gap(0.0368, -0.1113, 3.8482), "adam": Gap(1.5737, 0.4452, 5.71)},
    "decentralized all": {"sgd": Gap(0.0722, 0.2226, 1.4287), "adam": Gap(0.6976, -0.0556, 0.7125)},
    "decentralized shift_one": {"sgd": Gap(0.115, 0.2226, 3.4943), "adam": Gap(2.4013, 0.167, 5.9825)},
    "low_precision_decentralized": {"sgd": Gap(0.1001, 0.0556, 4.8655), "adam": Gap(2.4298, 0.167, 5.6225)},
    "low_precision overlapped": {"sgd": Gap(0.2552, 0.3339, 4.0009), "adam": Gap(2.3543, 0.1113, 8.366)},
    "async": {"sgd": Gap(0.3068, 0.4452), "adam": Gap(3.9334, 1.7251)},
}


def families_of(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[str, ...]:
    """The families of `optimizers`; both for one that is in neither, as Muon, since the worse one counts then.

    Examples:
        >>> from bagua.auto.loss_gaps import families_of
        >>> families_of([torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())])
        ('adam',)
    """
    found: set[str] = set()
    for each in optimizers:
        names = {kind.__name__ for kind in type(each).__mro__}
        known = {family for family, of in (("sgd", _SGD), ("adam", _ADAM)) if names & set(of)}
        found |= known or set(FAMILIES)
    return tuple(family for family in FAMILIES if family in found)


def gap_of(row: str, families: Iterable[str]) -> float | None:
    """The largest gap of a row of the benchmark in `families`, as a fraction; None if one was not measured."""
    gaps = [MEASURED.get(row, {}).get(family) for family in families]
    known = [each.fraction for each in gaps if each is not None]
    return max(known, default=0.0) if len(known) == len(gaps) else None
