"""Routing: which experts get a token, and the weights of their outputs.

Legend: S = tokens of this rank, E = experts of all ranks, T = rows that are sent (a token may go to two experts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Routing", "capacity_of", "top_1", "top_2"]


@dataclass(frozen=True)
class Routing:
    """The rows to send, sorted by expert, and the weights of the outputs.

    Attributes:
        token_T: the token of each row. Rows of one expert: first choices, then second ones, each in token order.
        weight_T: what the expert's output is multiplied with; differentiable.
        choice_T: 0 where the expert is the token's first choice, 1 where it is the second.
        rows_E: rows of each expert.
        exp_counts: [E] int64 on the CPU: tokens whose first choice it is, dropped ones included.
        l_aux: the load-balancing loss, a scalar; differentiable.
        num_dropped: choices that found their expert full.
    """

    token_T: Tensor
    weight_T: Tensor
    choice_T: Tensor
    rows_E: tuple[int, ...]
    exp_counts: Tensor
    l_aux: Tensor
    num_dropped: int


def capacity_of(num_tokens: int, num_experts: int, factor: float, k: int, min_capacity: int) -> int:
    """Most rows that one rank sends to one expert: max(ceil(k S / E factor), min_capacity).

    Source: arXiv:2006.16668 section 2.2 (k = 2), arXiv:2101.03961 equation 3 (k = 1).

    Examples:
        >>> bagua.moe.capacity_of(num_tokens=100, num_experts=8, factor=1.25, k=1, min_capacity=4)
        16
    """
    return max(math.ceil((k * num_tokens / num_experts) * factor), min_capacity)


def top_1(
    logits_SE: Tensor,
    capacity: int | None,
    used_S: Tensor | None = None,
    noise_SE: Tensor | None = None,
    priority_S: Tensor | None = None,
) -> Routing:
    """Send each token to the expert with the largest logit, weighted with that expert's probability.

    Args:
        logits_SE: the gate's, in the precision of the result.
        capacity: most rows to one expert; None for no limit.
        used_S: False (0) for tokens that go nowhere; None for all.
        noise_SE: added to the logits for the choice alone.
        priority_S: where an expert is full, tokens with larger values stay; None: those that come first.

    Returns:
        The routing; l_aux = E sum_e (mean probability of e) (share of tokens whose choice is e).

    Source: arXiv:2101.03961, equations 2 to 6.

    Examples:
        >>> routing = bagua.moe.top_1(torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 2.0]]), capacity=2)
        >>> routing.token_T, routing.rows_E
        (tensor([0, 1, 2]), (1, 2))
    """
    gates_SE = F.softmax(logits_SE, dim=1)
    used_S = _used(logits_SE, used_S)
    expert_S = (logits_SE if noise_SE is None else logits_SE + noise_SE).argmax(dim=1)
    kept_S = _within(expert_S, used_S, logits_SE.shape[1], capacity, priority_S)
    weight_S = gates_SE.gather(1, expert_S.unsqueeze(1)).squeeze(1)
    return _routing(gates_SE, used_S, [expert_S], [used_S], kept_S, weight_S)


def top_2(
    logits_SE: Tensor,
    capacity: int | None,
    used_S: Tensor | None = None,
    noise_SE: Tensor | None = None,
) -> Routing:
    """Send each token to two experts, weighted with their probabilities, which are scaled to the sum 1.

    An expert's places go to first choices before second ones, and then to tokens that come first. Where one of the
    two is full, the other counts whole.

    Args:
        logits_SE, capacity, used_S: as in `top_1`.
        noise_SE: added to the logits for the second choice; with Gumbel noise it is drawn by its probability.

    Returns:
        The routing; l_aux as in `top_1`, from first choices.

    Source: arXiv:2006.16668, algorithm 1.

    Examples:
        >>> routing = bagua.moe.top_2(torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 2.0]]), capacity=None)
        >>> routing.rows_E
        (3, 3)
    """
    num_tokens, num_experts = logits_SE.shape
    gates_SE = F.softmax(logits_SE, dim=1)
    used_S = _used(logits_SE, used_S)
    first_S = logits_SE.argmax(dim=1)
    others_SE = (logits_SE if noise_SE is None else logits_SE + noise_SE).detach()
    second_S = others_SE.scatter(1, first_S.unsqueeze(1), -math.inf).argmax(dim=1)
    has_second_S = used_S & (num_experts > 1)
    kept = _within(torch.cat([first_S, second_S]), torch.cat([used_S, has_second_S]), num_experts, capacity, None)
    kept_S2 = kept.view(2, num_tokens).T
    weights_S2 = gates_SE.gather(1, torch.stack([first_S, second_S], dim=1)) * kept_S2
    total_S1 = weights_S2.sum(1, keepdim=True).clamp(min=torch.finfo(weights_S2.dtype).eps)
    weight = (weights_S2 / total_S1).T.reshape(-1)
    return _routing(gates_SE, used_S, [first_S, second_S], [used_S, has_second_S], kept, weight)


def _used(logits_SE: Tensor, used_S: Tensor | None) -> Tensor:
    if used_S is None:
        return torch.ones(logits_SE.shape[0], dtype=torch.bool, device=logits_SE.device)
    if used_S.numel() != logits_SE.shape[0]:
        raise ValueError(f"used_token: {used_S.numel()} entries for {logits_SE.shape[0]} tokens")
    return used_S.reshape(-1).to(logits_SE.device) != 0


def _within(
    expert_N: Tensor, wanted_N: Tensor, num_experts: int, capacity: int | None, priority_N: Tensor | None
) -> Tensor:
    """Which of the wanted rows find a place, in the order of the rows or of falling priority."""
    if capacity is None:
        return wanted_N
    rows_N = torch.arange(expert_N.numel(), device=expert_N.device)
    if priority_N is not None:
        rows_N = priority_N.argsort(descending=True, stable=True)
    group_N = expert_N.masked_fill(~wanted_N, num_experts)[rows_N]
    order_N = group_N.argsort(stable=True)
    sorted_N = group_N[order_N]
    starts = torch.bincount(sorted_N, minlength=num_experts + 1).cumsum(0).roll(1)
    starts[0] = 0
    place_N = torch.arange(expert_N.numel(), device=expert_N.device) - starts[sorted_N]
    kept_N = torch.zeros_like(wanted_N)
    kept_N[rows_N[order_N]] = (place_N < capacity) & (sorted_N < num_experts)
    return kept_N


def _routing(
    gates_SE: Tensor,
    used_S: Tensor,
    experts: list[Tensor],
    wanted: list[Tensor],
    kept_N: Tensor,
    weight_N: Tensor,
) -> Routing:
    """Rows 0 to S-1 of [N] are first choices, the rest second ones."""
    num_tokens, num_experts = gates_SE.shape
    row_T = kept_N.nonzero().squeeze(1)
    expert_T = torch.cat(experts)[row_T]
    order_T = expert_T.argsort(stable=True)
    row_T = row_T[order_T]
    firsts_E = torch.bincount(experts[0][used_S], minlength=num_experts)
    # One transfer to the host: sizes of messages are needed there.
    numbers = [firsts_E, torch.bincount(expert_T, minlength=num_experts), torch.cat(wanted).sum().reshape(1)]
    firsts_cpu_E, kept_cpu_E, total = torch.cat(numbers).cpu().split([num_experts, num_experts, 1])
    if num_tokens:
        shares_E = firsts_E.to(gates_SE.dtype) / num_tokens
        l_aux = (gates_SE.mean(0) * shares_E).sum() * num_experts
    else:
        l_aux = gates_SE.sum()  # 0, with a gradient, so that all ranks go through the same backward pass
    return Routing(
        token_T=row_T % num_tokens if num_tokens else row_T,
        weight_T=weight_N[row_T],
        choice_T=row_T // max(num_tokens, 1),
        rows_E=tuple(kept_cpu_E.tolist()),
        exp_counts=firsts_cpu_E.clone(),
        l_aux=l_aux,
        num_dropped=int(total) - row_T.numel(),
    )
