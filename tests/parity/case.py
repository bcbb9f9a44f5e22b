"""One column of the matrix: an algorithm, with options under which a few steps show all of what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import bagua
from bagua import optim
from bagua.algorithms.base import Exactness, Payload
from tests.parity.model import Small, distance, equal, same_everywhere, train, weights

Params = Iterable[Any]


def sgd(params: Params) -> torch.optim.Optimizer:
    """For all algorithms that bring no optimizer of their own."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@dataclass
class Case:
    """An algorithm and how to use it here.

    Attributes:
        optimizer: makes one, of parameters or groups of them.
        options: of `distribute`.
        slack: how far apart, relative to the way gone, two runs may end that differ by rounding only.
    """

    name: str
    optimizer: Callable[[Params], torch.optim.Optimizer] = sgd
    options: dict[str, Any] = field(default_factory=dict)
    slack: float = 1e-4
    _plain: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def algorithm(self) -> bagua.Algorithm:
        """As specified."""
        return bagua.algorithms.get(self.name, **self.options)

    @property
    def shares_gradients(self) -> bool:
        """Whether ranks exchange gradients, so that their weights stay equal."""
        return self.algorithm.payload is Payload.GRAD

    @property
    def synchronous(self) -> bool:
        """Whether a run is the same every time."""
        return self.algorithm.exactness is not Exactness.ASYNCHRONOUS

    @property
    def own_optimizer(self) -> bool:
        """Whether it brings an optimizer of its own."""
        return self.optimizer is not sgd

    def params(self, model: nn.Module) -> list[nn.Parameter]:
        """Those that are trained."""
        return [param for param in model.parameters() if param.requires_grad]

    def distribute(self, model: nn.Module, optimizers: Any, **options: Any) -> nn.Module:
        """`bagua.distribute` with this algorithm."""
        return bagua.distribute(
            model, optimizers, self.name, **{"bucket_bytes": 600, "num_lanes": 1, **self.options, **options}
        )

    def build(
        self, make: Callable[[], nn.Module] = Small, seed: int = 0, **options: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A distributed model with its optimizer."""
        torch.manual_seed(seed)
        model = make()
        optimizer = self.optimizer(self.params(model))
        return self.distribute(model, optimizer, **options), optimizer

    def plain(self, make: Callable[[], nn.Module] = Small, seed: int = 0) -> dict[str, Tensor]:
        """Weights after the plain loop: what variants of the loop are compared with. Made once.

        Of an asynchronous algorithm this is the loop without averages, the only one that is the same every time.
        """
        key = f"{make.__qualname__} {seed}"
        if key not in self._plain:
            model, optimizer = self.build(make, seed)
            if not self.synchronous:
                bagua.pause(model)
            train(model, optimizer)
            self._plain[key] = weights(model)
            bagua.detach(model)
        return self._plain[key]

    def start(self, make: Callable[[], nn.Module] = Small, seed: int = 0) -> dict[str, Tensor]:
        """Weights before the first step."""
        torch.manual_seed(seed)
        return weights(make())

    def check_same_run(
        self, model: nn.Module, exactly: bool = False, make: Callable[[], nn.Module] = Small, slack: float = 0.0
    ) -> None:
        """`model` went the way of the plain loop: to the last bit, or as near as rounding lets it."""
        have, want, start = weights(model), self.plain(make), self.start(make)
        assert all(tensor.isfinite().all() for tensor in have.values())
        if not self.synchronous:
            # How much is averaged at which step depends on the moment. It pulls ranks together, never far away.
            assert 0 < distance(have, start) < 10 * distance(want, start)
        elif exactly:
            assert equal(have, want), f"{distance(have, want):.3g} apart"
        else:
            apart = distance(have, want) / distance(want, start)
            assert apart <= max(self.slack, slack), f"{apart:.3g} of the way apart"
        self.check_agreement(model)

    def check_stayed(self, before: dict[str, Tensor], after: dict[str, Tensor], prefix: str) -> None:
        """Parameters whose name begins with `prefix` are where they were, and the others are not.

        A codec that shares its range among the elements of a block, or has no zero, adds some noise to all of them.
        """
        names = [name for name in before if name.startswith(prefix)]
        rest = [name for name in before if name not in names]
        assert names and rest
        still = distance({n: before[n] for n in names}, {n: after[n] for n in names})
        moved = distance({n: before[n] for n in rest}, {n: after[n] for n in rest})
        assert moved > 1e-3 and still <= self.slack * moved, f"{still:.3g}, others {moved:.3g}"

    def check_agreement(self, model: nn.Module) -> None:
        """Ranks hold the same weights; those that need not, once averaged."""
        assert all(tensor.isfinite().all() for tensor in weights(model).values())
        if not self.shares_gradients:
            bagua.average_parameters(model)
        assert same_everywhere(weights(model)), "ranks hold different weights"


KNOWN = {
    case.name: case
    for case in (
        Case("async", slack=0.05),
        Case("bytegrad", slack=0.05),
        Case("diloco", options={"communication_interval": 2}),
        Case("local_sgd", options={"communication_interval": 2}),
        Case("low_precision_decentralized", slack=0.05),
        Case("sparse_loco", options={"communication_interval": 2}),
        Case("power_sgd", options={"rank": 1, "min_compression": 1.0}, slack=0.05),
        Case("qadam", lambda params: optim.QAdam(params, lr=0.01, warmup_steps=2), slack=0.1),
        Case("one_bit_lamb", lambda params: optim.OneBitLamb(params, lr=0.01, warmup_steps=2), slack=0.5),
        Case(
            "zero_one_adam",
            lambda params: optim.ZeroOneAdam(
                params, lr=0.01, var_freeze_step=2, local_step_scaler=2, local_step_clipper=2
            ),
            slack=0.5,
        ),
    )
}
FEW = ("gradient_allreduce", "bytegrad", "decentralized")  # with which rows are tried every day that cost much
NAMES = [row.name for row in bagua.algorithms.available(builtin_only=True)]


def case_of(name: str) -> Case:
    """A fresh case; an algorithm that is not known here is run with its defaults."""
    known = KNOWN.get(name)
    return Case(name) if known is None else Case(name, known.optimizer, known.options, known.slack)
