"""Models with random layer sizes, drawn from a seed: the same on every machine.

A name is `KIND@SEED/ELEMENTS`, for example `huge_first@7/2500000`: kind of the layer sizes, seed, and about how many
elements all layers have together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from random import Random

from bagua.bench.layers import Layer, Model

__all__ = ["GRAMMAR", "KINDS", "get"]

GRAMMAR = "KIND@SEED/ELEMENTS"
_NAME = re.compile(r"^([a-z_]+)@(\d+)/(\d+)$")
_LEAST, _MOST = 10_000, 10**9
_LOOKUP = 0.01  # work of a layer that only looks rows up, relative to one that multiplies
_SMALL_PER_LAYER = 16


# Only `Random.random()` is used: it is the one method whose sequence Python promises to keep.
def _between(draw: Random, low: float, high: float) -> float:
    return low + (high - low) * draw.random()


def _whole(draw: Random, low: int, high: int) -> int:
    return low + int((high - low + 1) * draw.random())


def _matrix(name: str, numel: float, work: float = 1.0) -> Layer:
    """A weight [rows, columns] of about `numel` elements and a bias; `work` is relative to the layer's elements."""
    columns = max(1, round(math.sqrt(numel)))
    rows = max(1, round(numel / columns) - 1)
    return Layer(name, ((rows, columns), (rows,)), work * rows * columns)


def _shares(draw: Random, num: int) -> list[float]:
    """`num` sizes that differ by up to a factor of about two; their sum is 1."""
    sizes = [_between(draw, 0.7, 1.3) for _ in range(num)]
    return [size / sum(sizes) for size in sizes]


def _even(draw: Random, elements: int) -> list[Layer]:
    shares = _shares(draw, _whole(draw, 4, 24))
    return [_matrix(f"layer{index}", share * elements) for index, share in enumerate(shares)]


def _huge_first(draw: Random, elements: int) -> list[Layer]:
    """As embeddings are: the largest gradient is ready last."""
    huge = _between(draw, 0.2, 0.7) * elements
    rest = _shares(draw, _whole(draw, 4, 16))
    others = [_matrix(f"layer{index}", share * (elements - huge)) for index, share in enumerate(rest, 1)]
    return [_matrix("embedding", huge, _LOOKUP), *others]


def _huge_last(draw: Random, elements: int) -> list[Layer]:
    """As the classifier over a vocabulary: the largest gradient is ready first."""
    huge = _between(draw, 0.2, 0.7) * elements
    rest = _shares(draw, _whole(draw, 4, 16))
    others = [_matrix(f"layer{index}", share * (elements - huge)) for index, share in enumerate(rest)]
    return [*others, _matrix("head", huge)]


def _thousands(draw: Random, elements: int) -> list[Layer]:
    """1000 to 3000 parameters, in layers of 16."""
    num_layers = _whole(draw, 1000 // _SMALL_PER_LAYER, 3000 // _SMALL_PER_LAYER)
    layers: list[Layer] = []
    for index, share in enumerate(_shares(draw, num_layers)):
        sizes = [max(1, round(part * share * elements)) for part in _shares(draw, _SMALL_PER_LAYER)]
        layers.append(Layer(f"block{index}", tuple((size,) for size in sizes), float(sum(sizes))))
    return layers


def _single(draw: Random, elements: int) -> list[Layer]:
    return [_matrix("layer", elements)]


KINDS: dict[str, Callable[[Random, int], list[Layer]]] = {
    "even": _even,
    "huge_first": _huge_first,
    "huge_last": _huge_last,
    "thousands": _thousands,
    "single": _single,
}


def get(name: str) -> Model:
    """Return the model that a name stands for.

    Raises:
        ValueError: the name is not `KIND@SEED/ELEMENTS`, or has too few or too many elements.
    """
    match = _NAME.match(name)
    if match is None or match[1] not in KINDS:
        raise ValueError(f"model {name!r}: expected {GRAMMAR}, with one of the kinds {', '.join(KINDS)}")
    elements = int(match[3])
    if not _LEAST <= elements <= _MOST:
        raise ValueError(f"model {name!r}: expected {_LEAST} to {_MOST} elements")
    return Model(name, tuple(KINDS[match[1]](Random(int(match[2])), elements)))
