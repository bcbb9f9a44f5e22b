"""Layers and models of the benchmark: names, shapes and shares of the work; no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Layer", "Model", "Shape"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """Parameters whose gradients appear together.

    Attributes:
        name: as in the model it is taken from.
        shapes: of its parameters.
        work: multiply-adds for one sample; only ratios between layers matter.
    """

    name: str
    shapes: tuple[Shape, ...]
    work: float

    @property
    def num_elements(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Model:
    """Layers in the order of the forward pass."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def num_elements(self) -> int:
        """Elements of all parameters."""
        return sum(layer.num_elements for layer in self.layers)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of all parameters."""
        return tuple(shape for layer in self.layers for shape in layer.shapes)
