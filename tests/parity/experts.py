"""Rows: mixture of experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from tests.parity.case import FEW, Case
from tests.parity.feature import feature
from tests.parity.model import STEPS, equal
from tests.parity.precision import LOCAL as STEPS_ALONE

LOCAL = (*STEPS_ALONE, "async")  # algorithms that step with a rank's own gradients

SECTION = "Mixture of experts"


class Mixture(nn.Module):
    """Two experts on each rank between two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.moe = bagua.moe.MoE(6, nn.Linear(6, 6), 2, random_token_selection=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden, l_aux, _ = self.moe(self.first(x))
        return self.last(hidden).square().mean() + 0.01 * l_aux


def split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights that all ranks hold, and this rank's experts, copied."""
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    own = {name for name in weights if "bagua_experts" in name}
    return {n: t for n, t in weights.items() if n not in own}, {n: weights[n] for n in own}


def gathered(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Those of all ranks."""
    found: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, tensors)
    return found


def train(case: Case, clip: bool) -> None:
    """Train, and compare what should be equal and what should not."""
    torch.manual_seed(dist.get_rank())
    model, alike = Mixture(), case.name not in LOCAL
    optimizer = case.optimizer(model.parameters())
    own = split(model)[1]
    case.distribute(model, optimizer)
    assert equal(split(model)[1], own), "experts were broadcast"
    for step in range(STEPS):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))
        optimizer.zero_grad()
        model(x).backward()
        if clip:
            norms = gathered({"norm": bagua.moe.clip_grad_norm_(model, 0.1)})
            assert not alike or all(torch.equal(each["norm"], norms[0]["norm"]) for each in norms)
        optimizer.step()
    if not alike:
        bagua.average_parameters(model)
    shared, experts = (gathered(part) for part in split(model))
    assert equal(shared[0], shared[1]), "ranks hold different shared weights"
    assert not any(torch.equal(tensor, experts[1][name]) for name, tensor in experts[0].items()), "experts were mixed"
    assert all(not torch.equal(tensor, own[name]) for name, tensor in experts[dist.get_rank()].items()), "not trained"
    bagua.detach(model)


@feature(SECTION, "`bagua.moe.MoE`: experts stay their rank's own, everything else is exchanged")
def mixture_of_experts(case: Case) -> None:
    """Whatever the algorithm."""
    train(case, clip=False)


@feature(SECTION, "`bagua.moe.clip_grad_norm_`: one norm over the experts of all ranks", daily=FEW)
def clipped_experts(case: Case) -> str | None:
    """Replicas stay equal."""
    train(case, clip=True)
    return "shared gradients are each rank's own, and so is the norm" if case.name in LOCAL else None
