"""Questions and paragraphs as sequences of a limited length, several for a long paragraph, cut by the tokenizer.

Legend: a sequence is [CLS] question [SEP] part of the paragraph [SEP].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from squad_file import Question

__all__ = ["Window", "make_windows"]


@dataclass(frozen=True)
class Window:
    """One sequence.

    Attributes:
        question: index of its question.
        inputs: of the model, with the first and last token of the answer: both 0 if it is not in here.
        first: index of the first token of the paragraph.
        places: characters of the paragraph for each of its tokens here, (start, end).
        scored: for each of these, whether no other window shows more of what is around it.
    """

    question: int
    inputs: dict[str, Any]
    first: int
    places: tuple[tuple[int, int], ...]
    scored: tuple[bool, ...]


def make_windows(
    questions: Sequence[Question], tokenizer: Any, max_seq_length: int, doc_stride: int, max_query_length: int
) -> list[Window]:
    """Return the windows of all questions, in order.

    Args:
        questions: what to cut.
        tokenizer: of transformers, a fast one.
        max_seq_length: most tokens of a sequence.
        doc_stride: tokens from the start of a window to that of the next.
        max_query_length: most tokens of a question; what is beyond is cut off.

    Raises:
        ValueError: nothing of a paragraph would fit, or parts of it would be skipped.
    """
    windows: list[Window] = []
    special = tokenizer.num_special_tokens_to_add(pair=True)
    for index, question in enumerate(questions):
        asked = tokenizer(
            question.text,
            add_special_tokens=False,
            truncation=True,
            max_length=max_query_length,
            return_offsets_mapping=True,
        )["offset_mapping"]
        room = max_seq_length - len(asked) - special
        if not 0 < doc_stride <= room:
            raise ValueError(
                f"doc_stride: {doc_stride} tokens, but only {room} of a paragraph fit beside a question of {len(asked)}"
            )
        cut = tokenizer(
            question.text[: asked[-1][1] if asked else 0],
            question.context,
            truncation="only_second",
            max_length=max_seq_length,
            stride=room - doc_stride,  # tokens that two windows share
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        windows += _of_question(index, question, cut, doc_stride)
    return windows


def _of_question(index: int, question: Question, cut: Any, doc_stride: int) -> list[Window]:
    parts = []  # first token of the paragraph, and places of all
    for number, places in enumerate(cut["offset_mapping"]):
        inside = [at for at, sequence in enumerate(cut.sequence_ids(number)) if sequence == 1]
        parts.append((inside[0] if inside else 0, tuple(map(tuple, (places[at] for at in inside)))))
    spans = [(n * doc_stride, n * doc_stride + len(places)) for n, (_, places) in enumerate(parts)]
    windows = []
    for number, (first, places) in enumerate(parts):
        start, end = _answer(question, places)
        inputs = {name: cut[name][number] for name in ("input_ids", "token_type_ids", "attention_mask")}
        inputs["start_positions"], inputs["end_positions"] = (0, 0) if start < 0 else (first + start, first + end)
        scored = tuple(_best(spans, at) == number for at in range(*spans[number]))
        windows.append(Window(index, inputs, first, places, scored))
    return windows


def _best(spans: Sequence[tuple[int, int]], at: int) -> int:
    """The window that shows most of what is around token `at`: on its shorter side, then the longer window."""

    def shown(number: int) -> float:
        begin, end = spans[number]
        return min(at - begin, end - 1 - at) + 0.01 * (end - begin) if begin <= at < end else -1.0

    return max(range(len(spans)), key=shown)


def _answer(question: Question, places: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """First and last of the tokens that overlap the first answer, if all of it is here; else (-1, -1)."""
    if not question.answers or not places:
        return -1, -1
    text, begin = question.answers[0]
    end = begin + len(text)
    inside = [at for at, place in enumerate(places) if place[0] < end and place[1] > begin]
    return (inside[0], inside[-1]) if inside and places[0][0] <= begin and places[-1][1] >= end else (-1, -1)
