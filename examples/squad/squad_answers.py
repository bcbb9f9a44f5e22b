"""From logits to answers, and how right they are."""

from __future__ import annotations

import json
import math
import re
import string
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from squad_file import Question
from squad_windows import Window
from torch import Tensor

__all__ = ["Candidate", "Scorer", "best_answers", "exact_match", "f1"]


class Candidate(NamedTuple):
    """A possible answer: its text and the sum of its two logits."""

    text: str
    score: float


class Scorer:
    """The Trainer's `compute_metrics`: exact match and F1 in percent, and how many questions; keeps the answers.

    Args:
        args: of the command line.
        questions: all that are asked.
        windows: of all of them, in the order of the Trainer's data set.
    """

    def __init__(self, args: Namespace, questions: Sequence[Question], windows: Sequence[Window]) -> None:
        self._args, self._questions, self._windows = args, questions, windows
        self.answers: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, prediction: Any) -> dict[str, float]:
        """Compute the metrics of a `transformers.EvalPrediction` with logits of first and last token, [N, T] each."""
        pairs = zip(*map(torch.as_tensor, prediction.predictions), strict=True)
        groups: list[tuple[list[Window], list[tuple[Tensor, Tensor]]]] = [([], []) for _ in self._questions]
        for window, logits in zip(self._windows, pairs, strict=True):
            groups[window.question][0].append(window)
            groups[window.question][1].append(logits)
        exact = overlap = 0.0
        for question, (windows, logits) in zip(self._questions, groups, strict=True):
            best = self._candidates(question, windows, logits)
            self.answers[question.id] = _with_probabilities(best)
            text = best[0].text if best else ""
            exact, overlap = exact + exact_match(text, question), overlap + f1(text, question)
        count = len(self._questions)
        return {"exact": 100 * exact / count, "f1": 100 * overlap / count, "total": float(count)}

    def write(self, directory: Path) -> None:
        """Write the answers of the last call."""
        directory.mkdir(parents=True, exist_ok=True)
        best = {key: value[0]["text"] if value else "" for key, value in self.answers.items()}
        for name, content in (("predictions", best), ("nbest_predictions", self.answers)):
            text = json.dumps(content, indent=1, ensure_ascii=False)
            (directory / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")

    def _candidates(
        self, question: Question, windows: Sequence[Window], logits: Sequence[tuple[Tensor, Tensor]]
    ) -> list[Candidate]:
        """Best first; that there is none is the empty text."""
        args = self._args
        best = best_answers(question, windows, logits, args.n_best_size, args.max_answer_length)
        if not args.version_2_with_negative:
            return best
        none = Candidate("", min((starts[0] + ends[0]).item() for starts, ends in logits))  # the first token's
        first = not best or none.score - best[0].score > args.null_score_diff_threshold
        return [none, *best] if first else [best[0], none, *best[1:]]


def best_answers(
    question: Question, windows: Sequence[Window], logits: Sequence[tuple[Tensor, Tensor]], count: int, longest: int
) -> list[Candidate]:
    """Return the `count` best spans of a question's windows, best first, each text once.

    Args:
        question: whose paragraph the windows show.
        windows: of this question.
        logits: of first and last token for each window, [T] each, perhaps with padding.
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


def _with_probabilities(best: Sequence[Candidate]) -> list[dict[str, Any]]:
    highest = max((each.score for each in best), default=0.0)
    weights = [math.exp(each.score - highest) for each in best]
    return [
        {"text": each.text, "probability": weight / sum(weights), "score": each.score}
        for each, weight in zip(best, weights, strict=True)
    ]
