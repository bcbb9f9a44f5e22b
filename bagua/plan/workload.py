"""The model that is trained: layers in the order of the forward pass, and the time of a step without communication."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from bagua.bench import models
from bagua.bench.models import Layer, Model

__all__ = ["Workload", "is_count", "load_model", "work_of"]

_COUNT = re.compile(r"^(\d+(?:\.\d+)?)(k|m|b|t)$", re.IGNORECASE)
_SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_EVEN_LAYERS = 32
_FORWARD_SHARE = 1 / 3  # a backward pass does twice the arithmetic of the forward pass


@dataclass(frozen=True)
class Workload:
    """A model and the time of its step with communication switched off.

    Attributes:
        model: layers and shapes of parameters.
        compute_s: forward and backward pass.
        forward_s: the forward pass alone.
        optimizer_s: the optimizer step.

    Raises:
        ValueError: names the argument that is wrong.

    Examples:
        >>> model = bagua.plan.load_model("25m")
        >>> round(bagua.plan.Workload.of(model, compute_s=0.3, optimizer_s=0.02).step_s, 3)
        0.32
    """

    model: Model
    compute_s: float
    forward_s: float
    optimizer_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compute_s", "forward_s", "optimizer_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: expected seconds >= 0, got {value!r}")
        if self.forward_s > self.compute_s:
            raise ValueError(f"forward_s: {self.forward_s} is more than the {self.compute_s} of forward and backward")

    @classmethod
    def of(cls, model: Model, compute_s: float, optimizer_s: float = 0.0) -> Workload:
        """A workload whose forward pass takes a third of `compute_s`."""
        return cls(model, compute_s, compute_s * _FORWARD_SHARE, optimizer_s)

    @property
    def step_s(self) -> float:
        """A step without communication."""
        return self.compute_s + self.optimizer_s

    def backward(self) -> list[tuple[Layer, float]]:
        """Layers in the order of the backward pass, each with its seconds."""
        total = sum(layer.work for layer in self.model.layers)
        seconds = self.compute_s - self.forward_s
        return [(layer, seconds * layer.work / total) for layer in reversed(self.model.layers)]


def is_count(text: str) -> bool:
    """Whether `text` is a number of parameters, as `1.3b`."""
    return _COUNT.match(text) is not None


def work_of(model: Model) -> float:
    """Floating-point operations of the forward and backward pass of one sample: three times two per multiply-add."""
    return 6.0 * sum(layer.work for layer in model.layers)


def load_model(text: str) -> Model:
    """Return the model that `text` names.

    Args:
        text: a model of `bagua.bench.models`; a number of parameters, as `1.3b`, spread over 32 equal layers; or
            `FILE.py:FUNCTION`, whose function returns a `torch.nn.Module`, which should be built on the "meta" device.

    Raises:
        ValueError: none of these; or the file does not build a module; says why.

    Examples:
        >>> bagua.plan.load_model("1.3b").num_elements
        1300000000
    """
    count = _COUNT.match(text)
    if count:
        return _even(text, round(float(count[1]) * _SCALES[count[2].lower()]))
    if ".py" in text:
        return _from_file(text)
    try:
        return models.get(text)
    except ValueError:
        known = ", ".join(name for name in models.MODELS if "/" not in name)
        raise ValueError(
            f"model: {text!r} is unknown; expected one of {known}, a number of parameters as 350m or 1.3b, "
            "or FILE.py:FUNCTION"
        ) from None


def _even(name: str, num_elements: int) -> Model:
    layers = min(_EVEN_LAYERS, num_elements)
    if layers < 1:
        raise ValueError(f"model: {name!r} has no parameters")
    ends = [num_elements * k // layers for k in range(layers + 1)]
    sizes = [high - low for low, high in itertools.pairwise(ends)]
    return Model(name, tuple(Layer(f"layer{k}", (_matrix(size),), size) for k, size in enumerate(sizes)))


def _matrix(numel: int) -> tuple[int, ...]:
    """A matrix of about that many elements as square as can be, in whole rows if they divide evenly."""
    side = math.isqrt(numel)
    for rows in range(side, max(side - 64, 0), -1):
        if numel % rows == 0:
            return rows, numel // rows
    return (numel,)


def _from_file(text: str) -> Model:
    file, _, function = text.partition(":")
    if not function:
        raise ValueError(f"model: {text!r} names no function; expected FILE.py:FUNCTION")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"model: there is no file {file!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        built = _call(module, function)
    except Exception as error:
        raise ValueError(f"model: {text!r} does not build: {type(error).__name__}: {error}") from error
    layers = _layers(built, text)
    if not layers:
        raise ValueError(f"model: {text!r} has no parameters that are trained")
    return Model(function, tuple(layers))


def _call(module: ModuleType, function: str) -> object:
    made = getattr(module, function, None)
    if not callable(made):
        raise ValueError(f"it has no function {function!r}")
    return made()


def _layers(built: object, text: str) -> list[Layer]:
    """One layer for each module that holds parameters; its work is taken to be one multiply-add an element."""
    from torch import nn

    if not isinstance(built, nn.Module):
        raise ValueError(f"model: {text!r} returned {type(built).__name__}, not a torch.nn.Module")
    seen: set[int] = set()
    layers: list[Layer] = []
    for name, module in built.named_modules():
        shapes: list[tuple[int, ...]] = []
        for param in module.parameters(recurse=False):
            if param.requires_grad and id(param) not in seen:
                seen.add(id(param))
                shapes.append(tuple(param.shape))
        if shapes:
            layers.append(Layer(name or "model", tuple(shapes), max(1, _numel(shapes))))
    return layers


def _numel(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)
