"""Layer shapes of known models, without their arithmetic.

Legend: a layer is a name, the shapes of its parameters, and its share of the model's work.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bagua.bench import drawn_models
from bagua.bench.layers import Layer, Model

__all__ = ["MODELS", "Layer", "Model", "get"]

TENTH = 0.1


def _wide(channels: int, width: float) -> int:
    return max(1, round(channels * width))


def _layers25m(width: float) -> list[Layer]:
    """16 equal layers, 25 M elements in all."""
    side = _wide(1250, width)
    return [Layer(f"layer{i}", ((side, side),), side * side) for i in range(16)]


def _vgg16(width: float) -> list[Layer]:
    """Configuration D of arXiv:1409.1556, images of 224 x 224."""
    layers, before, side = [], 3, 224
    for stage, (channels, depth) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for number in range(1, depth + 1):
            out = _wide(channels, width)
            shape = (out, before, 3, 3)
            layers.append(Layer(f"conv{stage}_{number}", (shape, (out,)), math.prod(shape) * side * side))
            before = out
        side //= 2
    features = before * side * side
    for number, out in enumerate((_wide(4096, width), _wide(4096, width), 1000), 6):
        layers.append(Layer(f"fc{number}", ((out, features), (out,)), out * features))
        features = out
    return layers


def _resnet50(width: float) -> list[Layer]:
    """arXiv:1512.03385, with the stride in the 3 x 3 convolution as in torchvision; images of 224 x 224."""
    layers: list[Layer] = []

    def conv(name: str, before: int, out: int, kernel: int, side: int) -> None:
        shape = (out, before, kernel, kernel)
        layers.append(Layer(name, (shape, (out,), (out,)), math.prod(shape) * side * side))  # with its norm

    before, side = _wide(64, width), 112
    conv("conv1", 3, before, 7, side)
    side = 56
    for stage, (channels, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        inner, outer = _wide(channels, width), _wide(4 * channels, width)
        for block in range(depth):
            name, half = f"layer{stage}.{block}", side // 2 if stage > 1 and block == 0 else side
            conv(f"{name}.conv1", before, inner, 1, side)
            conv(f"{name}.conv2", inner, inner, 3, half)
            conv(f"{name}.conv3", inner, outer, 1, half)
            if block == 0:
                conv(f"{name}.downsample", before, outer, 1, half)
            before, side = outer, half
    layers.append(Layer("fc", ((1000, before), (1000,)), 1000 * before))
    return layers


def _bert_large(width: float) -> list[Layer]:
    """arXiv:1810.04805, uncased, encoder and pooler; sequences of 128 tokens."""
    tokens, hidden, inner = 128, _wide(1024, width), _wide(4096, width)
    norm = ((hidden,), (hidden,))
    tables = ((30522, hidden), (512, hidden), (2, hidden))
    layers = [Layer("embeddings", (*tables, *norm), tokens * hidden)]
    square = ((hidden, hidden), (hidden,))
    for number in range(24):
        attention = tokens * (4 * hidden * hidden + 2 * tokens * hidden)
        layers.append(Layer(f"layer{number}.attention", (*square * 4, *norm), attention))
        shapes = ((inner, hidden), (inner,), (hidden, inner), (hidden,), *norm)
        layers.append(Layer(f"layer{number}.output", shapes, tokens * 2 * inner * hidden))
    layers.append(Layer("pooler", square, hidden * hidden))
    return layers


_BUILDERS: dict[str, Callable[[float], list[Layer]]] = {
    "layers25m": _layers25m,
    "vgg16": _vgg16,
    "bert_large": _bert_large,
    "resnet50": _resnet50,
}
MODELS = tuple(name + suffix for name in _BUILDERS for suffix in ("", "/10"))


def get(name: str) -> Model:
    """Return the model of that name; `NAME/10` has the same layers, narrower, with a tenth of the elements.

    `KIND@SEED/ELEMENTS` is a model with random layer sizes: see `bagua.bench.drawn_models`.

    Raises:
        ValueError: there is none.
    """
    if "@" in name:
        return drawn_models.get(name)
    base, tenth = name.removesuffix("/10"), name.endswith("/10")
    if base not in _BUILDERS:
        raise ValueError(f"model {name!r} is unknown; available: {', '.join(MODELS)}, {drawn_models.GRAMMAR}")
    build = _BUILDERS[base]
    width = _width_for(build, TENTH) if tenth else 1.0
    return Model(name, tuple(build(width)))


def _width_for(build: Callable[[float], list[Layer]], share: float) -> float:
    """The width at which `build` gives about `share` of its elements; found by bisection, as they grow with it."""

    def elements(width: float) -> int:
        return sum(layer.num_elements for layer in build(width))

    wanted, low, high = elements(1.0) * share, 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if elements(middle) < wanted else (low, middle)
    return high
