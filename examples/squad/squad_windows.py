"""Questions and paragraphs as sequences of a limited length, several for a long paragraph.

Legend: a sequence is [CLS] question [SEP] part of the paragraph [SEP]; T tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from squad_file import Question
from torch import Tensor

__all__ = ["Batch", "Encoder", "Window", "collate", "make_windows"]


class Encoder(Protocol):
    """What turns text into pieces."""

    pad_id: int
    start_id: int
    separator_id: int

    @property
    def encode(self) -> Callable[[str], Sequence[tuple[int, int, int]]]:
        """Number, first character and one past the last character of each piece of a text."""
        ...


@dataclass(frozen=True)
class Window:
    """One sequence.

    Attributes:
        question: index of its question.
        tokens: T piece numbers.
        first: index of the first token of the paragraph; the last one is T - 2.
        places: characters of the paragraph for each of its tokens here, (start, end).
        scored: for each of these, whether no other window shows more of what is around it.
        answer: tokens of the answer, first and last; (0, 0) if it is not in here.
    """

    question: int
    tokens: tuple[int, ...]
    first: int
    places: tuple[tuple[int, int], ...]
    scored: tuple[bool, ...]
    answer: tuple[int, int]


class Batch(NamedTuple):
    """Padded sequences: tokens, segments and "is no padding" [B, T], first and last token of the answers [B]."""

    tokens: Tensor
    types: Tensor
    mask: Tensor
    starts: Tensor
    ends: Tensor


def make_windows(
    questions: Sequence[Question], encoder: Encoder, max_seq_length: int, doc_stride: int, max_query_length: int
) -> list[Window]:
    """Return the windows of all questions, in order.

    Args:
        questions: what to cut.
        encoder: of texts.
        max_seq_length: most tokens of a sequence.
        doc_stride: tokens from the start of a window to that of the next.
        max_query_length: most tokens of a question; what is beyond is cut off.

    Raises:
        ValueError: nothing of a paragraph would fit, or parts of it would be skipped.
    """
    windows: list[Window] = []
    paragraphs: dict[str, list[tuple[int, int, int]]] = {}  # several questions share one
    for index, question in enumerate(questions):
        if question.context not in paragraphs:
            paragraphs[question.context] = [(n, start, end) for n, start, end in encoder.encode(question.context)]
        asked = [piece[0] for piece in encoder.encode(question.text)][:max_query_length]
        room = max_seq_length - len(asked) - 3
        if not 0 < doc_stride <= room:
            raise ValueError(
                f"doc_stride: {doc_stride} tokens, but only {room} of a paragraph fit beside a question of {len(asked)}"
            )
        windows += _cut(index, question, asked, paragraphs[question.context], encoder, room, doc_stride)
    return windows


def _cut(
    index: int,
    question: Question,
    asked: list[int],
    pieces: list[tuple[int, int, int]],
    encoder: Encoder,
    room: int,
    stride: int,
) -> list[Window]:
    begins = [0]
    while begins[-1] + room < len(pieces):
        begins.append(begins[-1] + stride)
    spans = [(begin, min(begin + room, len(pieces))) for begin in begins]
    best = [max(range(len(spans)), key=lambda n, at=at: _surrounding(spans[n], at)) for at in range(len(pieces))]
    found = _answer_pieces(question, pieces)
    first = len(asked) + 2
    windows = []
    for number, (begin, end) in enumerate(spans):
        tokens = [encoder.start_id, *asked, encoder.separator_id, *(piece[0] for piece in pieces[begin:end])]
        inside = found is not None and begin <= found[0] and found[1] < end
        answer = (first + found[0] - begin, first + found[1] - begin) if inside and found is not None else (0, 0)
        windows.append(
            Window(
                index,
                (*tokens, encoder.separator_id),
                first,
                tuple((piece[1], piece[2]) for piece in pieces[begin:end]),
                tuple(best[at] == number for at in range(begin, end)),
                answer,
            )
        )
    return windows


def _surrounding(span: tuple[int, int], at: int) -> float:
    """How much of what is around token `at` a window shows: the shorter side, then the longer window."""
    begin, end = span
    return min(at - begin, end - 1 - at) + 0.01 * (end - begin) if begin <= at < end else -1.0


def _answer_pieces(question: Question, pieces: list[tuple[int, int, int]]) -> tuple[int, int] | None:
    """First and last piece that overlap the first answer."""
    if not question.answers:
        return None
    text, begin = question.answers[0]
    inside = [number for number, piece in enumerate(pieces) if piece[1] < begin + len(text) and piece[2] > begin]
    return (inside[0], inside[-1]) if inside else None


def collate(windows: Sequence[Window], pad_id: int) -> Batch:
    """Pad to the longest of them."""
    length = max(len(window.tokens) for window in windows)
    tokens = torch.full((len(windows), length), pad_id)
    types = torch.zeros_like(tokens)
    mask = torch.zeros(len(windows), length, dtype=torch.bool)
    for row, window in enumerate(windows):
        size = len(window.tokens)
        tokens[row, :size] = torch.tensor(window.tokens)
        types[row, window.first : size] = 1
        mask[row, :size] = True
    starts, ends = torch.tensor([window.answer for window in windows]).unbind(1)
    return Batch(tokens, types, mask, starts, ends)
