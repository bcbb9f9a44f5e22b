"""Answer all questions on all ranks, each rank its share, and compare with the right answers."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from squad_answers import best_answers, exact_match, f1, no_answer_score
from squad_file import Question
from squad_windows import Encoder, Window, collate
from torch import Tensor, nn

__all__ = ["evaluate"]


def evaluate(
    args: Namespace,
    model: nn.Module,
    encoder: Encoder,
    questions: Sequence[Question],
    windows: Sequence[Window],
    device: torch.device,
) -> dict[str, float]:
    """Return exact match and F1 in percent, of all questions on all ranks; rank 0 writes the answers. Collective."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    groups: dict[int, list[Window]] = {}
    for window in windows:
        groups.setdefault(window.question, []).append(window)
    mine = [index for index in groups if index % size == rank]
    with _evaluating(model):
        logits = _logits(model, [w for index in mine for w in groups[index]], encoder, args, device)
    answers: dict[str, list[dict[str, Any]]] = {}
    totals = torch.zeros(3, dtype=torch.float64)
    for index in mine:
        own = [next(logits) for _ in groups[index]]
        best = _answer(args, questions[index], groups[index], own)
        answers[questions[index].id] = best
        text = best[0]["text"] if best else ""
        totals += torch.tensor([exact_match(text, questions[index]), f1(text, questions[index]), 1.0])
    torch.distributed.all_reduce(totals)
    everything = {key: value for part in _gather(answers) for key, value in part.items()}
    if rank == 0:
        _write(args.output_dir, everything)
    exact, overlap, count = totals.tolist()
    return {"exact": 100 * exact / count, "f1": 100 * overlap / count, "total": count}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)


def _logits(
    model: nn.Module, windows: list[Window], encoder: Encoder, args: Namespace, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of each window in turn, [T] each, on the CPU."""
    made: list[tuple[Tensor, Tensor]] = []
    for begin in range(0, len(windows), args.per_gpu_eval_batch_size):
        part = windows[begin : begin + args.per_gpu_eval_batch_size]
        batch = collate(part, encoder.pad_id)
        starts, ends = model(batch.tokens.to(device), batch.types.to(device), batch.mask.to(device))
        made += zip(starts.cpu(), ends.cpu(), strict=True)
    return iter(made)


def _answer(
    args: Namespace, question: Question, windows: list[Window], logits: list[tuple[Tensor, Tensor]]
) -> list[dict[str, Any]]:
    """Answers with probabilities, best first; that there is none is the empty text."""
    best = [(text, score) for text, score in best_answers(
        question, windows, logits, args.n_best_size, args.max_answer_length
    )]  # fmt: skip
    if args.version_2_with_negative:
        none = ("", no_answer_score(logits))
        first = not best or none[1] - best[0][1] > args.null_score_diff_threshold
        best = [none, *best] if first else [best[0], none, *best[1:]]
    highest = max((score for _, score in best), default=0.0)
    weights = [math.exp(score - highest) for _, score in best]
    pairs = zip(best, weights, strict=True)
    return [{"text": text, "probability": weight / sum(weights), "score": score} for (text, score), weight in pairs]


def _gather(answers: dict[str, Any]) -> list[dict[str, Any]]:
    """All ranks' answers on every rank, as JSON: nothing from the network is unpickled."""
    own = torch.frombuffer(bytearray(json.dumps(answers).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(sizes, torch.tensor([len(own)]))
    room = int(max(sizes))
    parts = [torch.zeros(room, dtype=torch.uint8) for _ in sizes]
    torch.distributed.all_gather(parts, torch.nn.functional.pad(own, (0, room - len(own))))
    return [json.loads(bytes(part[: int(number)].tolist()).decode()) for part, number in zip(parts, sizes, strict=True)]


def _write(directory: Path, answers: dict[str, list[dict[str, Any]]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    best = {key: value[0]["text"] if value else "" for key, value in answers.items()}
    (directory / "predictions.json").write_text(json.dumps(best, indent=1, ensure_ascii=False) + "\n")
    (directory / "nbest_predictions.json").write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
