"""A small character language model and its text, which ships with Python: nothing is downloaded.

The text is Python's own language reference, as `help("topics")` shows it (`pydoc_data.topics`): some 370,000
characters of English and code. Paragraphs that several topics share are taken once. Every tenth stretch of 20
paragraphs is held out for evaluation. The text differs a little between versions of Python; `Text.digest` tells
which one it was.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["VOCABULARY", "CharLM", "Text", "draw_windows", "even_windows", "load_text"]

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))  # 96 characters; all others are left out
_STRETCH = 20  # paragraphs that stay together


class Text(NamedTuple):
    """Characters as numbers (positions in `VOCABULARY`): two int64 vectors, and a digest of the whole text."""

    train: Tensor
    test: Tensor
    digest: str


@lru_cache(maxsize=1)
def load_text() -> Text:
    """Return the training text and the one that is held out; the same every time."""
    paragraphs = list(dict.fromkeys(part for name in sorted(topics) for part in topics[name].split("\n\n")))
    stretches = ["\n\n".join(paragraphs[at : at + _STRETCH]) for at in range(0, len(paragraphs), _STRETCH)]
    test = "\n\n".join(stretches[9::10])
    train = "\n\n".join(part for index, part in enumerate(stretches) if index % 10 != 9)
    digest = hashlib.sha256((train + "\0" + test).encode()).hexdigest()[:16]
    return Text(_encode(train), _encode(test), digest)


def _encode(text: str) -> Tensor:
    place = {character: index for index, character in enumerate(VOCABULARY)}
    return torch.tensor([place[character] for character in text if character in place])


def draw_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return `count` random windows [B, T] of `text` and, for each character, the one that follows: [B, T]."""
    starts = torch.randint(0, text.numel() - length, (count,), generator=generator)
    return _cut(text, starts, length)


def even_windows(text: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Like `draw_windows`, with windows spread evenly over `text`."""
    return _cut(text, torch.linspace(0, text.numel() - length - 1, count).long(), length)


def _cut(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    rows = text[starts[:, None] + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


class CharLM(nn.Module):
    """A recurrent net over characters (GRU); 49,824 parameters with the defaults.

    Args:
        width: features of a character.
        hidden: features of the state.
    """

    def __init__(self, width: int = 32, hidden: int = 96) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(VOCABULARY), width)
        self.recurrent = nn.GRU(width, hidden, batch_first=True)
        self.out = nn.Linear(hidden, len(VOCABULARY))

    def forward(self, x_BT: Tensor) -> Tensor:
        """Return logits [B, T, V] of the next character for windows [B, T]."""
        states_BTH, _ = self.recurrent(self.characters(x_BT))
        return self.out(states_BTH)
