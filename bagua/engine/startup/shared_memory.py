"""Parameters that share memory, as a decoder's weight that is a view of an encoder's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Algorithm, Payload
from bagua.engine.startup.inventory import Inventory

__all__ = ["check_memory"]

_NONE = -1


def check_memory(inventory: Inventory, algorithm: Algorithm, fallback: Algorithm | None = None) -> None:
    """Refuse parameters that share elements, with algorithms that exchange weights.

    Buckets of weights give each parameter memory of its own, which would untie them. Parameters that only lie in one
    storage, as ranges of a flat tensor or columns of a matrix, share nothing, and frozen ones stay where they are.

    Args:
        inventory: of the module.
        algorithm: what exchanges.
        fallback: what may take its place.

    Raises:
        ValueError: names two parameters and the algorithm.
    """
    chosen = next((each for each in (algorithm, fallback) if each and Payload.PARAM in each.payloads), None)
    if chosen is None:
        return
    for group in _crossing({**inventory.parameters, **inventory.frozen}):
        pair = _sharing(group)
        if pair is not None:
            raise ValueError(
                f"parameters {pair[0]!r} and {pair[1]!r} share memory, and {chosen.name!r} exchanges weights, for "
                "which each parameter gets memory of its own, so that they would no longer be tied; use one "
                "nn.Parameter in both places, as F.linear(x, self.encoder.weight.t()), or an algorithm that exchanges "
                "gradients"
            )


def _range(param: Tensor) -> tuple[int, int]:
    """Where the elements lie: the first address and the one behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    start = param.data_ptr()
    return start, start + (last + 1) * param.element_size()


def _crossing(params: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """Groups of several parameters whose ranges of memory overlap, one with the next; each in the order given."""
    placed = sorted(
        (*_range(param), name) for name, param in params.items() if param.numel() and param.untyped_storage().nbytes()
    )
    groups: list[set[str]] = []
    end = 0
    for start, stop, name in placed:
        if start >= end:
            groups.append(set())
        groups[-1].add(name)
        end = max(end, stop)
    for group in groups:
        if len(group) > 1:
            yield {name: param for name, param in params.items() if name in group}


def _sharing(group: Mapping[str, nn.Parameter]) -> tuple[str, str] | None:
    """Two parameters, one of them trainable, with an element in common; None if there are none.

    It takes memory for a map of the whole range.

    Args:
        group: trainable ones first.
    """
    names = list(group)
    ranges = [_range(param) for param in group.values()]
    low = min(start for start, _ in ranges)
    unit = math.gcd(*(start - low for start, _ in ranges), *(param.element_size() for param in group.values()))
    owners = torch.full(((max(stop for _, stop in ranges) - low) // unit,), _NONE, dtype=torch.int32, device="cpu")
    for number, (param, (start, _)) in enumerate(zip(group.values(), ranges, strict=True)):
        width = param.element_size() // unit
        strides = (*(stride * width for stride in param.stride()), 1)
        place = owners.as_strided((*param.shape, width), strides, (start - low) // unit)
        earlier = int(place.max())
        if earlier != _NONE:
            return names[earlier], names[number]
        if param.requires_grad:
            place.fill_(number)
    return None
