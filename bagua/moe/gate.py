"""`TopKGate`: the gating network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bagua.moe.routing import Routing, capacity_of, top_1, top_2

__all__ = ["NOISE", "TopKGate"]

NOISE = (None, "None", "Jitter", "RSample")
_JITTER = 1e-2


class TopKGate(nn.Module):
    """Gating network: a linear layer without bias whose outputs are the experts' logits; computed in fp32 or fp64.

    Args:
        model_dim: elements of a token.
        num_experts: of all ranks.
        k: experts for a token, 1 or 2.
        capacity_factor, eval_capacity_factor: places for rows, relative to an even spread; in training and evaluation.
        min_capacity: places of an expert at least.
        noisy_gate_policy: in training: "Jitter" multiplies the gate's input with 1 +- 0.01; "RSample" adds Gumbel noise
            to the logits for the choice of `k=1`; None or "None" does neither.
        drop_tokens: False lets an expert take all tokens that choose it.
        random_token_selection: in training with `k=1`, tokens that find a place are drawn; else the first ones do.

    Raises:
        ValueError: an argument is wrong; names it.

    Source: arXiv:2006.16668 (two experts), arXiv:2101.03961 (one expert, jitter).

    Examples:
        >>> gate = bagua.moe.TopKGate(model_dim=8, num_experts=4)
        >>> routing = gate(torch.randn(16, 8))
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
        *,
        drop_tokens: bool = True,
        random_token_selection: bool = True,
    ) -> None:
        super().__init__()
        for name, value in (("model_dim", model_dim), ("num_experts", num_experts)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
        if k not in (1, 2):
            raise ValueError(f"k: expected 1 or 2 experts per token, got {k!r}")
        for name, factor in (("capacity_factor", capacity_factor), ("eval_capacity_factor", eval_capacity_factor)):
            if not 0 < factor < float("inf"):
                raise ValueError(f"{name}: expected a number > 0, got {factor!r}")
        if isinstance(min_capacity, bool) or not isinstance(min_capacity, int) or min_capacity < 0:
            raise ValueError(f"min_capacity: expected an integer >= 0, got {min_capacity!r}")
        if noisy_gate_policy not in NOISE:
            raise ValueError(f"noisy_gate_policy: expected one of {NOISE}, got {noisy_gate_policy!r}")
        self.wg = nn.Linear(model_dim, num_experts, bias=False).float()
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.random_token_selection = random_token_selection

    def forward(self, input: Tensor, used_token: Tensor | None = None) -> Routing:
        """Route tokens.

        Shapes:
            input: [S, model_dim]; used_token: S elements, 0 for tokens that go to no expert.
        """
        weight = self.wg.weight
        wide = torch.promote_types(torch.promote_types(input.dtype, weight.dtype), torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            x = input.to(wide)
            if self.training and self.noisy_gate_policy == "Jitter":
                x = x * torch.empty_like(x).uniform_(1 - _JITTER, 1 + _JITTER)
            logits = F.linear(x, weight.to(wide))
            factor = self.capacity_factor if self.training else self.eval_capacity_factor
            capacity: int | None = None
            if self.drop_tokens:
                capacity = capacity_of(len(logits), logits.shape[1], factor, self.k, self.min_capacity)
            if self.k == 2:
                return top_2(logits, capacity, used_token, _gumbel(logits) if self.training else None)
            noise = _gumbel(logits) if self.training and self.noisy_gate_policy == "RSample" else None
            drawn = self.training and self.random_token_selection and self.drop_tokens
            priority = torch.rand(len(logits), dtype=torch.float32, device=logits.device) if drawn else None
            return top_1(logits, capacity, used_token, noise, priority)


def _gumbel(logits: Tensor) -> Tensor:
    """-log(-log u) of independent u; of an exponential variate it is minus the logarithm."""
    return -torch.empty_like(logits.detach()).exponential_().log()
