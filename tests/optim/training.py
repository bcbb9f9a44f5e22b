"""A model with parameters of many kinds, trained with an optimizer that is fused or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bagua.optim import fuse


class Model(nn.Module):
    """Small, large, 0-dimensional, single-element, permuted and sometimes unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.large = nn.Linear(40, 1700)  # 68,000 elements: large enough to be stepped in pieces
        self.conv = nn.Conv1d(1, 3, 5, padding=2)
        self.norm = nn.LayerNorm(1700)
        self.rare = nn.Linear(40, 40)
        self.scale = nn.Parameter(torch.ones(()))
        self.slope = nn.Parameter(torch.full((1,), 0.25))
        self.turned = nn.Parameter(torch.randn(7, 40).t())  # strides (1, 40)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        x = torch.nn.functional.prelu(self.first(x), self.slope)
        if rare:
            x = self.rare(x)
        y = self.conv(self.norm(self.large(x)).unsqueeze(1)).mean(1)
        return (y * self.scale).square().mean() + (x @ self.turned).square().mean()


def train(
    make: Callable[[Any], torch.optim.Optimizer],
    fused: bool,
    steps: int = 8,
    set_to_none: bool = True,
    each: Callable[[int, Model, torch.optim.Optimizer], None] | None = None,
) -> tuple[Model, torch.optim.Optimizer]:
    """Train; the layer `rare` has no gradient in most steps. `each` is called before each step's forward pass."""
    torch.manual_seed(0)
    model = Model()
    optimizer = make(model.parameters())
    if fused:
        assert fuse(optimizer) is optimizer
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        if each is not None:
            each(step, model, optimizer)
        model(torch.randn(4, 6, generator=generator), step % 3 == 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return model, optimizer


def assert_same(one: tuple[Model, torch.optim.Optimizer], other: tuple[Model, torch.optim.Optimizer]) -> None:
    """Weights and state dicts are equal bit for bit, and their tensors have equal strides."""
    for (name, a), (_, b) in zip(one[0].named_parameters(), other[0].named_parameters(), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.isfinite().all(), name
    a, b = one[1].state_dict(), other[1].state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert {k for k, slot in a["state"].items() if slot} == {k for k, slot in b["state"].items() if slot}
    for number, slot in a["state"].items():
        for key, value in slot.items():
            got = b["state"][number][key]
            assert type(got) is type(value), (number, key)
            if isinstance(value, Tensor):
                assert torch.equal(value, got) and value.stride() == got.stride(), (number, key)
            else:
                assert value == got, (number, key)
