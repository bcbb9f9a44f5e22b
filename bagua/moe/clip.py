"""Gradient clipping by the norm of all parameters, including experts on other ranks.

Legend: R = ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bagua.engine.startup.rank_local import is_rank_local, rank_local_names
from bagua.moe.spread import Spread

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: Any = None,
) -> Tensor:
    """Scale gradients so that their norm over all parameters, every rank's experts included, is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, whose norm would take in one rank's experts only: ranks would scale shared
    gradients differently, and replicas would drift apart. Here shared parameters count once and experts of all ranks
    count. Where all ranks have the same shared gradients, all get the same norm, bit for bit. Collective: call it on
    all ranks, between the backward pass and the step, with the same arguments.

    Args:
        parameters: the module, or its parameters. Of parameters alone, those marked themselves as a rank's own are
            recognized, as experts are; of a module, those in a module that is marked, too.
        max_norm: the largest norm that is left as it is, >= 0.
        norm_type: p of the p-norm, > 0; `math.inf` for the largest absolute element.
        error_if_nonfinite: raise if the norm is NaN or infinite.
        foreach: as in `torch.nn.utils.clip_grad_norm_`.
        process_group: the one of `bagua.distribute` and the `MoE` layers; None for all ranks.

    Returns:
        The norm before clipping: a scalar on the device of the parameters.

    Raises:
        ValueError: `max_norm` or `norm_type` is out of range.
        TypeError: an argument of another type, named.
        RuntimeError: the norm is not finite and `error_if_nonfinite`; on every rank.
        CommunicationError: a rank did not come; names it.

    Bytes: 8 (R-1) sent.

    Examples:
        >>> model(inputs).square().mean().backward()
        >>> norm = bagua.moe.clip_grad_norm_(model, max_norm=1.0)
        >>> optimizer.step()
    """
    for option, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(value, int | float | Tensor):
            raise TypeError(f"{option}: expected a number, got {type(value).__name__}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm: expected a number >= 0, got {max_norm!r}")
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a number > 0, or math.inf, got {norm_type!r}")
    own, shared = _split(parameters)
    device = (own + shared)[0].device if own or shared else torch.device("cpu")
    norms = [_norm(params, norm_type, foreach, device) for params in (shared, own)]
    everyone = Spread(process_group).gather(norms[1])
    total = torch.linalg.vector_norm(torch.cat([norms[0].view(1), everyone]), norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} over all ranks is {total.item()}, so they cannot be clipped; "
            "set error_if_nonfinite=False to scale them by it all the same"
        )
    torch.nn.utils.clip_grads_with_norm_(own + shared, max_norm, total.float(), foreach)
    return total.float()


def _split(parameters: nn.Module | Tensor | Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split parameters into rank-local and replicated ones."""
    if isinstance(parameters, nn.Module):
        local = rank_local_names(parameters)
        params = list(parameters.named_parameters())
        return [p for name, p in params if name in local], [p for name, p in params if name not in local]
    one = isinstance(parameters, Tensor) or not isinstance(parameters, Iterable)
    found: list[Any] = [parameters] if one else list(parameters)  # pyright: ignore[reportArgumentType]
    for each in found:
        if not isinstance(each, Tensor):
            raise TypeError(f"parameters: expected a module or its parameters, got {type(each).__name__}")
    return [p for p in found if is_rank_local(p)], [p for p in found if not is_rank_local(p)]


def _norm(params: list[Tensor], norm_type: float, foreach: bool | None, device: torch.device) -> Tensor:
    grads = [param.grad for param in params if param.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
    return norm.detach().to(device, torch.float64)
