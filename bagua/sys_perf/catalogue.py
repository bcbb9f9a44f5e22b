"""Models by name: from torchvision and transformers where they are installed, else the minimal ones here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bagua.sys_perf.models import VGG16, BertConfig, BertForPreTraining, ResNet
from bagua.sys_perf.models.resnet import DEPTHS
from bagua.sys_perf.models.width import scaled

__all__ = ["OWN", "SOURCES", "Choice", "choose"]

SOURCES = ("auto", "own", "library")

_IMAGE: dict[str, Callable[[int, float], nn.Module]] = {
    "vgg16": lambda classes, scale: VGG16(classes, scale),
    **{f"resnet{depth}": lambda classes, scale, depth=depth: ResNet(depth, classes, scale) for depth in DEPTHS},
}
_TEXT: dict[str, Callable[[float], BertConfig]] = {"bert_base": BertConfig.base, "bert_large": BertConfig.large}
OWN = (*_IMAGE, *_TEXT)


@dataclass(frozen=True)
class Choice:
    """A model that is about to be made.

    Attributes:
        name: as it was asked for.
        source: "own", or the library whose definition it is.
        vocab_size: word pieces, if it reads text; None for images.
        make: builds it, on the device of the context.
    """

    name: str
    source: str
    vocab_size: int | None
    make: Callable[[], nn.Module]


def choose(name: str, source: str = "auto", scale: float = 1.0, num_classes: int = 1000) -> Choice:
    """Return how to make the model `name`.

    Args:
        name: one of `OWN` (`bert-large` for `bert_large` too), or any classifier of torchvision's.
        source: "own" definitions, those of a "library", or "auto": the library's if it is installed and scale is 1.
        scale: factor of the widths; own definitions only.
        num_classes: of an image classifier.

    Raises:
        ValueError: there is no such model, or not with this source and scale; the message says what to do.
    """
    name = name.replace("-", "_")
    scaled(1, scale)  # refuses what is no scale
    if source not in SOURCES:
        raise ValueError(f"source: expected one of {', '.join(SOURCES)}, got {source!r}")
    library = "transformers" if name in _TEXT else "torchvision"
    if source == "library" and scale != 1.0:
        raise ValueError(f"scale: {scale:g} needs the built-in definitions; those of {library} have one size")
    if source != "own" and scale == 1.0:
        made = _from_transformers(name) if name in _TEXT else _from_torchvision(name, num_classes)
        if made is not None:
            return made
        if source == "library":
            raise ValueError(f"model: {library} is not installed, or has no {name!r}; built in: {', '.join(OWN)}")
    if name in _IMAGE:
        return Choice(name, "own", None, lambda: _IMAGE[name](num_classes, scale))
    if name in _TEXT:
        config = _TEXT[name](scale)
        return Choice(name, "own", config.vocab_size, lambda: BertForPreTraining(config))
    raise ValueError(f"model: {name!r} is unknown; built in: {', '.join(OWN)}; others need torchvision")


def _from_torchvision(name: str, num_classes: int) -> Choice | None:
    models = _optional("torchvision.models")
    if models is None or name not in models.list_models(module=models):
        return None
    return Choice(name, "torchvision", None, lambda: models.get_model(name, weights=None, num_classes=num_classes))


class _Heads(nn.Module):
    """transformers' pre-training model, with a tuple for an output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, types: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `BertForPreTraining.forward`."""
        out = self.model(input_ids=tokens, token_type_ids=types, attention_mask=mask)
        return out.prediction_logits, out.seq_relationship_logits


def _from_transformers(name: str) -> Choice | None:
    library = _optional("transformers")
    if library is None:
        return None
    own = _TEXT[name](1.0)
    config = library.BertConfig(
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        num_hidden_layers=own.num_layers,
        num_attention_heads=own.num_heads,
        intermediate_size=own.intermediate_size,
    )
    return Choice(name, "transformers", own.vocab_size, lambda: _Heads(library.BertForPreTraining(config)))


def _optional(name: str) -> Any:
    """The module, or None if its package is not installed; one that is there and broken raises."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == name.split(".")[0]:
            return None
        raise
