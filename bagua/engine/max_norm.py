"""Embeddings with `max_norm`, which change weights in the forward pass: each rank those that it looks up."""

from __future__ import annotations

import sys

from torch import nn

from bagua.algorithms.base import Payload
from bagua.engine.engine import Engine

__all__ = ["tell_of_max_norm"]


def tell_of_max_norm(module: nn.Module, engine: Engine) -> None:
    """Warn if `module` has one that is trained, and no average of weights makes the replicas equal again."""
    last = engine.state.root.at_step(sys.maxsize)
    if engine.team.size == 1 or Payload.PARAM in last.payloads:
        return
    names = {id(param): name for name, param in engine.inventory.parameters.items()}
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None and id(part.weight) in names:
            engine.state.notice(
                f"the {type(part).__name__} of {names[id(part.weight)]!r} has max_norm={part.max_norm:g}: its forward "
                "pass rescales rows in place, on each rank those that it looks up. So the weights of the ranks will "
                "differ, as with DistributedDataParallel, and bagua.average_parameters leaves them so with "
                f"{last.name!r}; leave max_norm out, and rescale all rows on all ranks after each step: "
                f"with torch.no_grad(): weight.renorm_({part.norm_type:g}, 0, {part.max_norm:g})",
                urgent=engine.team.rank == 0,
            )
            return
