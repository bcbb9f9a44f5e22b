"""`Experts`: the experts of one rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Experts", "is_moe_param"]


def is_moe_param(param: Tensor) -> bool:
    """Whether `param` belongs to an expert, so that this rank alone holds it.

    Examples:
        >>> experts = bagua.moe.Experts(torch.nn.Linear(8, 8))
        >>> [bagua.moe.is_moe_param(param) for param in experts.parameters()]
        [True, True]
    """
    return bool(getattr(param, "expert", False))


class Experts(nn.Module):
    """Copies of one module, each applied to its own rows.

    Args:
        expert: rows [T, M] to rows [T, M], for any T, 0 included; of a tuple the first entry counts.
        num_local_experts: how many copies.
        rank_local: this rank alone holds them; False: every rank holds all experts, which are averaged like any
            other parameter.

    Examples:
        >>> experts = bagua.moe.Experts(torch.nn.Linear(8, 8), num_local_experts=2)
    """

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, *, rank_local: bool = True) -> None:
        super().__init__()
        self.bagua_rank_local = (
            rank_local  # `bagua.distribute` looks for it; it outlives copies, marks on tensors do not
        )
        self.bagua_experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(num_local_experts)])
        self.num_local_experts = num_local_experts
        self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _mark(self) -> None:
        if self.bagua_rank_local:
            for param in self.bagua_experts.parameters():
                param.expert = True  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Apply expert 0 to the first `counts[0]` of `rows`, expert 1 to the next `counts[1]`, and so on.

        Raises:
            ValueError: an expert changed the shape.
        """
        answers: list[Tensor] = []
        for number, (part, expert) in enumerate(zip(rows.split(counts), self.bagua_experts, strict=True)):
            answer = expert(part)
            answer = answer[0] if isinstance(answer, tuple) else answer
            if answer.shape != part.shape:
                raise ValueError(
                    f"expert {number}: returned shape {list(answer.shape)} for input {list(part.shape)}; "
                    "it must return as many rows of the same width"
                )
            answers.append(answer)
        return torch.cat(answers) if len(answers) > 1 else answers[0]
