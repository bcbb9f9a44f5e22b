"""Errors that this rank feeds back outlive a change of the members."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bagua.engine.state_dict import States
from bagua.exchanges import Exchange

__all__ = ["carry_errors"]


@torch.no_grad()
def carry_errors(before: States, now: States) -> None:
    """Copy errors from the states `before` to those of the same exchanges and buckets in `now`.

    A step that was lost may have left a part of them: of some elements the error before that step, of others the one
    after it, or what was to be sent. All of these differ from the error of a step that counts by less than one
    gradient; without errors everything that earlier steps have not sent yet would be lost. What is not finite, after an
    overflow, becomes zero.
    """
    for exchange, index in dict.fromkeys((exchange, index) for exchange, index, _ in now):
        for name in exchange.fed_back:
            old, new = _parts(before, exchange, index, name), _parts(now, exchange, index, name)
            if not old or sum(map(Tensor.numel, old)) != sum(map(Tensor.numel, new)):
                continue  # this rank was alone, or another one sent for its node
            _copy(torch.cat([each.view(-1) for each in old]), new)


def _parts(states: States, exchange: Exchange, index: int, name: str) -> list[Tensor]:
    """A tensor of all parts of a bucket, in their order."""
    found = {part: state for (made, bucket, part), state in states.items() if (made, bucket) == (exchange, index)}
    return [found[part][name] for part in sorted(found) if name in found[part]]


def _copy(errors: Tensor, parts: Iterable[Tensor]) -> None:
    start = 0
    for part in parts:
        stop = start + part.numel()
        part.view(-1).copy_(errors[start:stop].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        start = stop
