"""Parameters that a followed optimizer trains and no distributed module holds: each rank trains them alone."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bagua.engine.hooks import attachments
from bagua.engine.startup.rank_local import is_rank_local

__all__ = ["tell_of_strays"]

_told: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, int]] = weakref.WeakKeyDictionary()


def tell_of_strays(optimizer: torch.optim.Optimizer) -> None:
    """Warn if `optimizer` steps with parameters that no rank exchanges, beside those of a distributed module.

    Before a step, not at `distribute`: one optimizer may hold several modules, which are distributed one by one.
    """
    engines = [each.engine for each in attachments.all() if any(one is optimizer for one in each.engine.optimizers)]
    if not engines or max(engine.team.size for engine in engines) == 1:
        return
    if any(engine.tracker.nesting.within for engine in engines):
        return  # its groups may hold other tensors now, as within a fused step
    strays = _strays(optimizer)
    if not strays or _told.get(optimizer) == strays:
        return
    _told[optimizer] = strays
    engine, total = engines[0], sum(strays.values())
    number = next(number for number, ref in enumerate(engine.followed.refs) if ref() is optimizer)
    groups = ", ".join(map(str, strays))
    engine.state.notice(
        f"optimizer number {number} ({type(optimizer).__name__}) also trains {total} "
        f"{'parameters' if total > 1 else 'parameter'} (in its parameter {'groups' if len(strays) > 1 else 'group'} "
        f"{groups}) that no distributed module holds: Bagua neither broadcasts nor averages them, so each rank trains "
        "its own; put them into one module with the model, such as a torch.nn.ModuleDict or ModuleList, and give that "
        "to bagua.distribute()",
        urgent=engine.team.rank == 0,
    )


def _strays(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """How many there are, by number of the group."""
    ours = {id(param) for param in _distributed()}
    found: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        alone = sum(1 for param in group["params"] if id(param) not in ours and _is_trained_alone(param))
        if alone:
            found[number] = alone
    return found


def _distributed() -> Iterator[nn.Parameter]:
    """Of all distributed modules, with those that users have left to the ranks on purpose."""
    for module, attachment in attachments.pairs():
        yield from module.parameters()
        yield from attachment.engine.inventory.parameters.values()


def _is_trained_alone(param: Tensor) -> bool:
    """Tensor subclasses, such as DTensor, are exchanged by whoever made them."""
    return param.requires_grad and not is_rank_local(param) and type(param.data) is Tensor
