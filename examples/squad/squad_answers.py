"""From logits to answers, and how right they are."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from squad_file import Question
from squad_windows import Window
from torch import Tensor

__all__ = ["Candidate", "best_answers", "exact_match", "f1", "no_answer_score"]


class Candidate(NamedTuple):
    """A possible answer: its text and the sum of its two logits."""

    text: str
    score: float


def best_answers(
    question: Question, windows: Sequence[Window], logits: Sequence[tuple[Tensor, Tensor]], count: int, longest: int
) -> list[Candidate]:
    """Return the `count` best spans of a question's windows, best first, each text once.

    Args:
        question: whose paragraph the windows show.
        windows: of this question.
        logits: of first and last token for each window, [T] each.
        count: at least one is returned if the paragraph has a token.
        longest: tokens of an answer.
    """
    found: dict[str, float] = {}
    for window, (starts, ends) in zip(windows, logits, strict=True):
        size = len(window.places)
        starts, ends = (each[window.first : window.first + size].float() for each in (starts, ends))
        top_starts, top_ends = (each.topk(min(count, size)).indices.tolist() for each in (starts, ends))
        pairs = [(i, j) for i in top_starts for j in top_ends if i <= j < i + longest and window.scored[i]]
        pairs += [(i, i) for i in top_starts if window.scored[i]]
        for i, j in pairs:
            text = question.context[window.places[i][0] : window.places[j][1]]
            found[text] = max(found.get(text, -math.inf), (starts[i] + ends[j]).item())
    return sorted((Candidate(*each) for each in found.items()), key=lambda each: -each.score)[:count]


def no_answer_score(logits: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the least score over all windows of "it is not in here", which the first token stands for."""
    return min((starts[0] + ends[0]).item() for starts, ends in logits)


def exact_match(answer: str, question: Question) -> float:
    """1 if the answer is one of the right ones, case, punctuation and articles aside; else 0."""
    return max(float(_words(answer) == _words(right)) for right in _right(question))


def f1(answer: str, question: Question) -> float:
    """Harmonic mean of precision and recall of the answer's words, best over the right answers.

    Source: arXiv:1606.05250, section 6.1; without an answer: arXiv:1806.03822, section 5.
    """
    return max(_f1(_words(answer), _words(right)) for right in _right(question))


def _right(question: Question) -> list[str]:
    return [text for text, _ in question.answers if _words(text)] or [""]


def _f1(given: list[str], right: list[str]) -> float:
    if not given or not right:
        return float(given == right)
    same = sum((Counter(given) & Counter(right)).values())
    return 2 * same / (len(given) + len(right))


def _words(text: str) -> list[str]:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()
