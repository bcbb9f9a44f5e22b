"""A model with one synthetic batch, and the loss of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bagua.sys_perf.catalogue import Choice

__all__ = ["Workload", "make_workload"]

MASKED = 0.15  # share of the tokens that BERT has to guess
MASK_TOKEN = 103  # of the published vocabulary
FIRST_WORD = 999  # pieces before it are reserved there
IGNORED = -100


@dataclass
class Workload:
    """What is trained.

    Attributes:
        model: on its device.
        loss: of the batch; it runs the forward pass.
        unit: what a batch holds, for the output: "img" or "seq".
        description: of one sample.
    """

    model: nn.Module
    loss: Callable[[], Tensor]
    unit: str
    description: str

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(param.numel() for param in self.model.parameters())


def make_workload(
    choice: Choice, batch_size: int, image_size: int, seq_length: int, device: torch.device, seed: int
) -> Workload:
    """Make the model and one batch that is used in every step.

    Args:
        choice: which model.
        batch_size: samples.
        image_size: side of the images, pixels.
        seq_length: tokens of a sequence.
        device: of both.
        seed: of the batch; weights come from torch's generator.
    """
    model = choice.make().to(device)
    generator = torch.Generator().manual_seed(seed)
    if choice.vocab_size is None:
        return _images(model, batch_size, image_size, device, generator)
    return _sequences(model, choice.vocab_size, batch_size, seq_length, device, generator)


def _images(model: nn.Module, size: int, side: int, device: torch.device, generator: torch.Generator) -> Workload:
    images = torch.randn(size, 3, side, side, generator=generator).to(device)
    labels = torch.randint(1000, (size,), generator=generator).to(device)

    def loss() -> Tensor:
        out = model(images)
        if not isinstance(out, Tensor):
            raise TypeError(f"model: {type(model).__name__} returns {type(out).__name__}, not a tensor of logits")
        return F.cross_entropy(out, labels)

    return Workload(model, loss, "img", f"images of {side} x {side} pixels, 1000 classes")


def _sequences(
    model: nn.Module, words: int, size: int, length: int, device: torch.device, generator: torch.Generator
) -> Workload:
    """Two segments of equal length; the loss is that of both pre-training tasks (arXiv:1810.04805, section 3.1)."""
    tokens = torch.randint(FIRST_WORD, words, (size, length), generator=generator)
    masked = torch.rand(size, length, generator=generator) < MASKED
    masked[:, 1] = True  # one at least
    labels = torch.where(masked, tokens, IGNORED).to(device)
    tokens = torch.where(masked, MASK_TOKEN, tokens).to(device)
    types = (torch.arange(length) >= length // 2).long().expand(size, length).to(device)
    follows = torch.randint(2, (size,), generator=generator).to(device)

    def loss() -> Tensor:
        guessed, order = model(tokens, types)
        words_loss = F.cross_entropy(guessed.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return words_loss + F.cross_entropy(order.float(), follows)

    return Workload(model, loss, "seq", f"sequences of {length} tokens, masked words and next sentence")
