"""Questions and answers in files of the SQuAD format, versions 1.1 and 2.0.

Source: arXiv:1606.05250 and arXiv:1806.03822; the format is that of the files published with them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Question", "read_questions"]


@dataclass(frozen=True)
class Question:
    """A question about a paragraph.

    Attributes:
        id: unique in the file.
        text: the question.
        context: the paragraph.
        answers: (text, first character in `context`); several are alternatives, none means that there is no answer.
    """

    id: str
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]


def read_questions(path: Path, with_negative: bool = False) -> list[Question]:
    """Return the questions of a file.

    Args:
        path: of the file.
        with_negative: keep those without an answer, which version 2.0 has.

    Raises:
        ValueError: it is not of the format, or an answer is not where it says; names the file and the question.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))["data"]
        questions = [
            _question(path, each, paragraph["context"])
            for article in data
            for paragraph in article["paragraphs"]
            for each in paragraph["qas"]
        ]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not of the SQuAD format: {error!r}") from error
    if len({question.id for question in questions}) < len(questions):
        raise ValueError(f"{path}: questions share an id")
    questions = [question for question in questions if question.answers or with_negative]
    if not questions:
        raise ValueError(f"{path}: no questions with an answer")
    return questions


def _question(path: Path, entry: dict[str, Any], context: str) -> Question:
    answers = () if entry.get("is_impossible") else entry["answers"]
    found = tuple((str(answer["text"]), int(answer["answer_start"])) for answer in answers)
    for text, start in found:
        if not text or context[start : start + len(text)] != text:
            raise ValueError(f"{path}: question {entry['id']}: {text!r} is not at character {start} of its paragraph")
    return Question(str(entry["id"]), str(entry["question"]), context, found)
