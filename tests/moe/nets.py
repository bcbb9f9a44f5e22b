"""A small net with experts, and optimizers that algorithms need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import bagua
from bagua.moe import MoE


class Net(nn.Module):
    """A dense layer, experts with a buffer of their own, and another dense layer."""

    def __init__(self, group: Any, num_local: int = 2, seed: int = 0, **options: Any) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        expert.register_buffer("seen", torch.zeros(3))
        self.first = nn.Linear(6, 6)
        self.moe = MoE(6, expert, num_local, random_token_selection=False, process_group=group, **options)
        self.last = nn.Linear(6, 3)
        generator = torch.Generator().manual_seed(seed)  # ranks are threads in some tests, which share torch's own
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        middle, l_aux, _ = self.moe(self.first(x))
        return self.last(middle), l_aux

    def experts(self) -> dict[str, Tensor]:
        """Weights and buffers of this rank alone, copied."""
        return {name: x.detach().clone() for name, x in self.state_dict().items() if "bagua_experts" in name}

    def shared(self) -> dict[str, Tensor]:
        """All others, copied."""
        return {name: x.detach().clone() for name, x in self.state_dict().items() if "bagua_experts" not in name}


def optimizer(algorithm: str, params: Iterable[Any]) -> torch.optim.Optimizer:
    if algorithm == "qadam":
        return bagua.optim.QAdam(params, lr=0.01, warmup_steps=3)
    if algorithm == "one_bit_lamb":
        return bagua.optim.OneBitLamb(params, lr=0.01, warmup_steps=3)
    if algorithm == "zero_one_adam":
        return bagua.optim.ZeroOneAdam(
            params, lr=0.01, var_freeze_step=3, var_update_scaler=1, local_step_scaler=1, local_step_clipper=2
        )
    if algorithm == "dion":
        return torch.optim.SGD(params, lr=0.01)
    return torch.optim.Adam(params, lr=0.01)


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    out, l_aux = model(x)
    return out.square().mean() + 0.01 * l_aux
