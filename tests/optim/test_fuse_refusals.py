"""What must not be fused is refused, with the reason, and left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import bagua
from bagua.optim import NotElementwiseError, fuse
from bagua.optim.fused import is_fused
from tests.optim.optimizers import (
    BertAdam,
    DecayOfMatrices,
    KnowsItsParams,
    Lamb,
    Lars,
    Noisy,
    Shampoo,
)


def params(matrices_only: bool = False) -> list[nn.Parameter]:
    shapes = [(4, 3), (5, 5)] if matrices_only else [(4, 3), (5,), (2, 2, 2)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Lamb, {}), (Lars, {}), (Shampoo, {}), (DecayOfMatrices, {}), (Noisy, {}), (optim.Adafactor, {}),
        (optim.LBFGS, {}), (optim.SparseAdam, {}), (bagua.optim.OneBitLamb, {}), (bagua.optim.QAdam, {}),
        (bagua.optim.ZeroOneAdam, {}), (BertAdam, {"clip": 1.0}),
    ],
)  # fmt: skip
def test_refused(kind: Any, options: dict[str, Any]) -> None:
    optimizer = kind(params(), **options)
    with pytest.raises(NotElementwiseError, match=f"^optimizer: {kind.__name__} cannot be fused: .*"):
        fuse(optimizer)
    assert not is_fused(optimizer) and "step" not in vars(optimizer)
    assert type(optimizer.state).__name__ == "defaultdict"


def test_muon() -> None:
    with pytest.raises(NotElementwiseError, match="fails on flat parameters"):
        fuse(optim.Muon(params(matrices_only=True)))


def test_every_dtype_of_groups_with_equal_options_is_tried() -> None:
    class LambOfDoubles(Lamb):
        def scale(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
            return super().scale(p, update) if p.dtype == torch.float64 else torch.ones(())

    doubles = [nn.Parameter(param.detach().double()) for param in params()]
    with pytest.raises(NotElementwiseError):
        fuse(LambOfDoubles([{"params": params()}, {"params": doubles}]))
    fuse(LambOfDoubles([{"params": params()}, {"params": params()}]))


def test_the_reason_names_the_state() -> None:
    class RowMean(Lamb):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p]["mean"] = p.grad.mean().expand_as(p).clone()
                    p.sub_(p.grad)

    with pytest.raises(NotElementwiseError, match=r"step 1 of a trial, state 'mean' of a parameter of shape \[7\]"):
        fuse(RowMean(params()))


def test_a_trial_changes_nothing() -> None:
    own = params()
    optimizer = KnowsItsParams(own)
    before = [param.detach().clone() for param in own]
    for param in own:
        param.grad = torch.ones_like(param)
    generator = torch.random.get_rng_state()
    fuse(optimizer)  # does no good, but no harm
    with pytest.raises(NotElementwiseError):
        fuse(Noisy(own))
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert all(torch.equal(a, b) for a, b in zip(before, own, strict=True))
    assert optimizer.mine[0] is own[0]
    optimizer.step()
    assert all(torch.equal(a - 1, b) for a, b in zip(before, own, strict=True))


def test_a_state_made_at_once_is_part_of_the_trial() -> None:
    class Eager(Lamb):
        def __init__(self, params: Any):
            super().__init__(params)
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"sum": torch.full_like(p, 0.1), "steps": 0}

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p]["sum"].add_(p.grad)
                    self.state[p]["steps"] += 1
                    p.sub_(self.state[p]["sum"])

    own = params()
    optimizer = fuse(Eager(own))
    for param in own:
        param.grad = torch.ones_like(param)
    before = own[1].detach().clone()
    optimizer.step()
    assert torch.equal(own[1], before - torch.full((5,), 0.1).add_(1.0))
    assert optimizer.state[own[1]]["steps"] == 1


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="optimizer: expected a torch.optim.Optimizer, got Linear"):
        fuse(nn.Linear(1, 1))  # pyright: ignore[reportArgumentType]
    optimizer = optim.SGD(params(), lr=0.1)
    assert fuse(fuse(optimizer)) is optimizer
    replaced = optim.SGD(params(), lr=0.1)
    setattr(replaced, "step", lambda: None)  # noqa: B010
    with pytest.raises(ValueError, match="was replaced"):
        fuse(replaced)
    with pytest.raises(ValueError, match="differentiable"):
        fuse(optim.SGD(params(), lr=0.1, differentiable=True))
    outer = optim.SGD(params(), lr=0.1)
    setattr(outer, "base", optim.SGD(params(), lr=0.1))  # noqa: B010
    with pytest.raises(ValueError, match="its attribute 'base'"):
        fuse(outer)


def test_without_a_check_what_is_found_late_is_an_error() -> None:
    optimizer = fuse(Shampoo(params(matrices_only=True)), check=False)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="element by element"):
        optimizer.step()


def test_sparse_gradients_and_several_closure_calls() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = fuse(optim.SGD([*table.parameters(), *params()], lr=0.1))
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="dense gradients only"):
        optimizer.step()

    class Twice(Lamb):
        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            if closure is not None:
                closure()
                closure()

    several = fuse(Twice(params()))
    with pytest.raises(RuntimeError, match="several times"):
        several.step(lambda: 0.0)
    step = several.step
    del several
    with pytest.raises(RuntimeError, match="no longer exists"):
        step()
