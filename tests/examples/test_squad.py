"""Question answering: pieces and spans are where they say, scores are SQuAD's, and the script learns and resumes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.scripts import ROOT, start
from tests.rank_pool import RankPool

FOLDER = ROOT / "examples" / "squad"
SMALLEST = ["--hidden_size", "16", "--num_layers", "1", "--num_heads", "2", "--no_cuda", "--dropout", "0"]


def load(name: str) -> Any:
    """Import a module of the example."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def run_script(words: list[str]) -> dict[str, float]:
    """On a rank."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("main").main(words)
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("main", None)  # a name that others use


# Word pieces.


def test_longest_piece_first_and_places() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "##a", "!", "cafe", "i"]
    pieces = load("wordpiece").WordPiece(words).encode("Unaffable!  Café Xyz İ")
    text = "Unaffable!  Café Xyz İ"
    assert [(words[piece.id], text[piece.start : piece.end]) for piece in pieces] == [
        ("un", "Un"),
        ("##aff", "aff"),
        ("##able", "able"),
        ("!", "!"),
        ("cafe", "Café"),
        ("[UNK]", "Xyz"),
        ("i", "İ"),
    ]


@pytest.mark.parametrize("text", ["Straße—é", "e\u0301a", "日本 go", "", " \t\n", "a" * 101, "😀x", "İx"])
def test_every_letter_is_in_one_piece(text: str) -> None:
    tokenizer = load("wordpiece").WordPiece.learn([text, text], 1000)
    pieces = tokenizer.encode(text)
    covered = [place for piece in pieces for place in range(piece.start, piece.end)]
    assert len(covered) == len(set(covered))
    assert {place for place, letter in enumerate(text) if letter.isalnum()} <= set(covered)
    assert (tokenizer.ids["[UNK]"] in [piece.id for piece in pieces]) == (len(text) > 100)


def test_a_vocabulary_is_written_and_read(tmp_path: Path) -> None:
    kind = load("wordpiece").WordPiece
    made = kind.learn(["the cat sat on the mat", "the end"], 30)
    assert "the" in made.ids and "sat" not in made.ids
    made.write(tmp_path / "vocab.txt")
    assert kind.read(tmp_path / "vocab.txt").vocabulary == made.vocabulary
    with pytest.raises(ValueError, match=r"\[SEP\] missing"):
        kind(["[PAD]", "[UNK]", "[CLS]"])


# Windows and answers.

CONTEXT = "zero one two three four five six seven eight nine"


def windows_of(answer: str, length: int, stride: int) -> tuple[Any, Any, list[Any]]:
    question = load("squad_file").Question("q", "which one?", CONTEXT, ((answer, CONTEXT.index(answer)),))
    tokenizer = load("wordpiece").WordPiece.learn([CONTEXT] * 2 + ["which ?"] * 2, 1000)
    return question, tokenizer, load("squad_windows").make_windows([question], tokenizer, length, stride, 64)


def test_windows_show_everything_and_know_the_answer() -> None:
    _, tokenizer, windows = windows_of("six seven", 11, 2)  # 5 words of the text beside 3 of the question
    shown = [CONTEXT[window.places[0][0] : window.places[-1][1]] for window in windows]
    assert [text.split()[0] for text in shown] == ["zero", "two", "four", "six"]
    assert shown[-1].split() == ["six", "seven", "eight", "nine"]
    scored = [window.places[n] for window in windows for n, yes in enumerate(window.scored) if yes]
    assert sorted(scored) == [(piece.start, piece.end) for piece in tokenizer.encode(CONTEXT)], "each word once"
    for window in windows:
        assert len(window.tokens) <= 11
        first, last = window.answer
        shown = CONTEXT[window.places[0][0] : window.places[-1][1]]
        assert ("six seven" in shown) == (window.answer != (0, 0))
        if last:
            inside = window.places[first - window.first][0], window.places[last - window.first][1]
            assert CONTEXT[slice(*inside)] == "six seven"
    assert any(window.answer != (0, 0) for window in windows)


def test_a_stride_that_would_skip_words_is_refused() -> None:
    with pytest.raises(ValueError, match="doc_stride: 6 tokens, but only 5"):
        windows_of("six", 11, 6)


def test_batches_are_padded() -> None:
    _, tokenizer, windows = windows_of("six", 11, 3)
    short = windows_of("six", 64, 9)[2]
    batch = load("squad_windows").collate([windows[0], short[0]], tokenizer.pad_id)
    assert batch.tokens.shape == (2, len(short[0].tokens))
    assert batch.mask.sum(1).tolist() == [len(windows[0].tokens), len(short[0].tokens)]
    assert batch.types[1].tolist() == [0] * short[0].first + [1] * (len(short[0].tokens) - short[0].first)


def test_the_best_span_of_all_windows() -> None:
    answers = load("squad_answers")
    question, _, windows = windows_of("six seven", 11, 2)

    def logits(first: str, last: str, score: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        made = []
        for window in windows:
            texts = [CONTEXT[slice(*place)] for place in window.places]
            pair = (torch.zeros(len(window.tokens)), torch.zeros(len(window.tokens)))
            for row, word in zip(pair, (first, last), strict=True):
                if word in texts:
                    row[window.first + texts.index(word)] = score
            made.append(pair)
        return made

    assert answers.best_answers(question, windows, logits("six", "seven", 5.0), 3, 30)[0] == ("six seven", 10.0)
    backwards = answers.best_answers(question, windows, logits("seven", "six", 5.0), 20, 30)
    assert all(CONTEXT.index(each.text) >= 0 and each.score < 10 for each in backwards)
    longest = answers.best_answers(question, windows, logits("four", "eight", 5.0), 20, 2)
    assert max(len(each.text.split()) for each in longest) <= 2
    outside = logits("six", "seven", 5.0)
    for starts, _ in outside:
        starts[0] = 100.0  # "not here" is no span
    assert answers.best_answers(question, windows, outside, 3, 30)[0].text == "six seven"
    assert answers.no_answer_score(outside) == 100.0


@pytest.mark.parametrize(
    ("given", "right", "exact", "f1"),
    [
        ("the Oberau", ["Oberau."], 1.0, 1.0),
        ("a town Oberau", ["Oberau"], 0.0, 2 / 3),
        ("two two", ["two"], 0.0, 2 / 3),
        ("Lindau", ["Oberau", "lindau"], 1.0, 1.0),
        ("", [], 1.0, 1.0),
        ("Lindau", [], 0.0, 0.0),
        ("", ["Lindau"], 0.0, 0.0),
    ],
)
def test_scores(given: str, right: list[str], exact: float, f1: float) -> None:
    answers = load("squad_answers")
    question = load("squad_file").Question("q", "?", "", tuple((text, 0) for text in right))
    assert answers.exact_match(given, question) == exact
    assert answers.f1(given, question) == pytest.approx(f1)


# Files.


@pytest.mark.parametrize("name", ["train", "dev"])
def test_the_bundled_files_are_right(name: str) -> None:
    questions = load("squad_file").read_questions(FOLDER / f"tiny-{name}.json")
    assert len(questions) == {"train": 360, "dev": 120}[name]
    if name == "dev":
        known = {q.context for q in load("squad_file").read_questions(FOLDER / "tiny-train.json")}
        assert not known & {question.context for question in questions}


def squad_text(answer: str, start_at: int, impossible: bool = False) -> str:
    entry = {"id": "1", "question": "?", "answers": [{"text": answer, "answer_start": start_at}]}
    entry |= {"is_impossible": impossible}
    return json.dumps({"data": [{"paragraphs": [{"context": "an old dog", "qas": [entry]}]}]})


def test_files_that_are_wrong(tmp_path: Path) -> None:
    read, file = load("squad_file").read_questions, tmp_path / "file.json"
    for text, message in (
        (squad_text("dog", 6), "question 1: 'dog' is not at character 6"),
        ("[]", "not of the SQuAD format"),
        ("{", "not of the SQuAD format"),
        (squad_text("dog", 7, impossible=True), "no questions with an answer"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read(file)
    assert read(file, with_negative=True)[0].answers == ()


# The script.


def test_a_resumed_run_gives_the_same_answers(pool: RankPool, tmp_path: Path) -> None:
    words = [*SMALLEST, "--max_steps", "6", "--save_steps", "3", "--algorithm", "bytegrad", "--seed", "1"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    first = pool.run(2, run_script, [*words, "--output_dir", str(whole), "--gradient_accumulation_steps", "2"])
    assert first[0] == first[1] and first[0]["total"] == 120
    checkpoints = sorted(path for path in (whole / "checkpoints").iterdir() if path.is_dir())
    assert len(checkpoints) == 2
    (again / "checkpoints").mkdir(parents=True)
    checkpoints[0].rename(again / "checkpoints" / checkpoints[0].name)
    more = ["--gradient_accumulation_steps", "2", "--resume"]
    assert pool.run(2, run_script, [*words, "--output_dir", str(again), *more]) == first
    best = (whole / "nbest_predictions.json").read_text()
    assert (again / "nbest_predictions.json").read_text() == best
    # What was saved answers alike, on one rank, without the training.
    alone = ["--do_eval", "--no_cuda", "--model_name_or_path", str(whole), "--output_dir", str(tmp_path / "alone")]
    assert pool.run(1, run_script, alone) == first[:1]
    made = json.loads((tmp_path / "alone" / "predictions.json").read_text())
    assert made == json.loads((whole / "predictions.json").read_text()) and len(made) == 120


def test_questions_without_an_answer(pool: RankPool, tmp_path: Path) -> None:
    """The second version of the format; a threshold decides."""
    file = tmp_path / "file.json"
    file.write_text(squad_text("dog", 7, impossible=True))
    words = [*SMALLEST, "--predict_file", str(file), "--version_2_with_negative", "--max_steps", "1"]
    for threshold, score in (("-1000000", 100.0), ("1000000", 0.0)):
        out = str(tmp_path / threshold)
        scores = pool.run(2, run_script, [*words, "--null_score_diff_threshold", threshold, "--output_dir", out])
        assert scores[0] == {"exact": score, "f1": score, "total": 1.0}


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parse = load("squad_flags").parse
    (tmp_path / "x").touch()
    for words, message in (
        (["--output_dir", str(tmp_path)], "is not empty; --overwrite_output_dir"),
        (["--train_file", "nowhere.json"], "--train_file: there is no file nowhere.json"),
        (["--doc_stride", "0"], "argument --doc_stride: expected at least 1, not 0"),
        (["--do_eval"], "the directory of a trained model is needed"),
    ):
        with pytest.raises(SystemExit):
            parse(["--output_dir", str(tmp_path / "new"), *words])
        assert message in capsys.readouterr().err
    parse(["--output_dir", str(tmp_path / "new"), "--threads", "4", "--overwrite_cache"])
    assert capsys.readouterr().err.count("has no effect") == 2


def test_transformers_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    args = load("squad_flags").parse(["--model_name_or_path", "bert-base-uncased", "--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="transformers is not installed"):
        load("squad_model").load_model(args, [])


@pytest.mark.slow
def test_it_learns_under_the_launcher(tmp_path: Path) -> None:
    words = ["-m", "bagua.distributed.run", "--nproc-per-node", "2", "examples/squad/main.py", "--no_cuda"]
    done = start(*words, "--output_dir", tmp_path)
    assert done.returncode == 0, done.stderr
    scores = done.stdout.splitlines()[-1]
    assert scores.startswith("exact match ")
    assert float(scores.split("F1 ")[1].split(" %")[0]) > 70, scores
