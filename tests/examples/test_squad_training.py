"""Question answering with the Trainer: windows are where they say, and the script learns and resumes."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.original.data import write_bert, write_squad
from benchmarks.original.runs import all_runs
from tests.examples.scripts import start
from tests.examples.squad import FOLDER, load, run_script, squad_text
from tests.interop.conftest import Loops
from tests.interop.fresh_state import as_launched
from tests.rank_pool import RankPool

for _package in ("transformers", "accelerate"):
    pytest.importorskip(_package, reason=f"needs {_package}; `make test-interop` runs it")

import bagua  # noqa: E402

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
SMALLEST = ["--hidden_size", "16", "--num_layers", "1", "--num_heads", "2", "--no_cuda"]
MARK = 1234.5
CONTEXT = "zero one two three four five six seven eight nine"


def on_rank(words: list[str]) -> dict[str, float]:
    """Run the script as the launcher starts it."""
    with as_launched():
        return run_script(words)


def printed(words: list[str]) -> str:
    """What the script prints on a rank."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        on_rank(words)
    return text.getvalue()


@pytest.fixture
def ranks(pool: RankPool) -> Loops:
    return Loops(pool)


def history(checkpoint: Path) -> list[dict[str, float]]:
    """What the Trainer has logged."""
    return json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]


def losses_of(checkpoint: Path) -> list[float]:
    """By step."""
    return [each["loss"] for each in history(checkpoint) if "loss" in each]


def mark_first_loss(checkpoint: Path) -> None:
    """Put `MARK` there, which only a run that goes on from the checkpoint shows."""
    file = checkpoint / "trainer_state.json"
    state = json.loads(file.read_text())
    state["log_history"][0]["loss"] = MARK
    file.write_text(json.dumps(state))


# Word pieces, windows and answers.


def tokenizer_of(*texts: str) -> Any:
    question = load("squad_file").Question
    pieces = load("squad_model").learn_pieces([question("q", "", text, ()) for text in texts], 1000)
    return load("squad_model").BertTokenizerFast(vocab=pieces)


def windows_of(answer: str, length: int, stride: int, asked: str = "which one?") -> tuple[Any, Any, list[Any]]:
    question = load("squad_file").Question("q", asked, CONTEXT, ((answer, CONTEXT.index(answer)),))
    tokenizer = tokenizer_of(f"{CONTEXT} which ?", f"which ? {CONTEXT}", "which")
    return question, tokenizer, load("squad_windows").make_windows([question], tokenizer, length, stride, 3)


def test_pieces_are_learned_from_the_texts() -> None:
    questions = load("squad_file").read_questions(FOLDER / "tiny-train.json")
    pieces = load("squad_model").learn_pieces(questions, 400)
    assert pieces == load("squad_model").learn_pieces(questions, 400)
    assert {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "born", "where"} <= set(pieces) and "Where" not in pieces
    assert sorted(pieces.values()) == list(range(400))
    assert len(load("squad_model").learn_pieces(questions, 4000)) > 400


def test_windows_show_everything_and_know_the_answer() -> None:
    _, tokenizer, windows = windows_of("six seven", 11, 2)  # 5 words of the text beside 3 of the question
    shown = [CONTEXT[window.places[0][0] : window.places[-1][1]] for window in windows]
    assert [text.split()[0] for text in shown] == ["zero", "two", "four", "six"]
    assert shown[-1].split() == ["six", "seven", "eight", "nine"]
    scored = [window.places[n] for window in windows for n, yes in enumerate(window.scored) if yes]
    assert [CONTEXT[slice(*place)] for place in sorted(scored)] == CONTEXT.split(), "each word once"
    for window, text in zip(windows, shown, strict=True):
        tokens = window.inputs["input_ids"]
        assert len(tokens) == window.first + len(window.places) + 1 <= 11
        words = tokenizer.convert_ids_to_tokens(tokens)
        assert words == ["[CLS]", "which", "one", "?", "[SEP]", *text.split(), "[SEP]"]
        assert window.inputs["token_type_ids"] == [0] * window.first + [1] * (len(words) - window.first)
        answer = window.inputs["start_positions"], window.inputs["end_positions"]
        assert words[answer[0] : answer[1] + 1] == (["six", "seven"] if "six seven" in text else ["[CLS]"])
    assert any(window.inputs["start_positions"] for window in windows)


def test_a_stride_that_would_skip_words_is_refused() -> None:
    with pytest.raises(ValueError, match="doc_stride: 6 tokens, but only 5"):
        windows_of("six", 11, 6)


def test_a_long_question_is_cut() -> None:
    _, _, windows = windows_of("six", 11, 5, asked="which one? which one? which one?")
    assert [window.first for window in windows] == [5, 5]


def test_the_best_span_of_all_windows() -> None:
    answers = load("squad_answers")
    question, _, windows = windows_of("six seven", 11, 2)

    def logits(first: str, last: str, score: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        made = []
        for window in windows:
            texts = [CONTEXT[slice(*place)] for place in window.places]
            pair = torch.zeros(11), torch.zeros(11)
            for row, word in zip(pair, (first, last), strict=True):
                row[window.first + len(texts) :] = -100.0  # the Trainer's padding
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


# The script.


def test_a_resumed_run_gives_the_same_answers(ranks: Loops, tmp_path: Path) -> None:
    words = [*SMALLEST, "--max_steps", "6", "--save_steps", "3", "--logging_steps", "1", "--algorithm", "bytegrad"]
    words += ["--seed", "1", "--gradient_accumulation_steps", "2"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    first = ranks.run(2, on_rank, [*words, "--output_dir", str(whole)])
    assert first[0] == first[1] and first[0]["total"] == 120
    assert {path.name for path in whole.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-6"}
    (again / "checkpoint-5").mkdir(parents=True)  # one that was interrupted
    (whole / "checkpoint-3").rename(again / "checkpoint-3")
    mark_first_loss(again / "checkpoint-3")
    assert ranks.run(2, on_rank, [*words, "--output_dir", str(again), "--resume"]) == first
    best = (whole / "nbest_predictions.json").read_text()
    assert (again / "nbest_predictions.json").read_text() == best
    losses = losses_of(whole / "checkpoint-6")
    assert len(losses) == 6
    assert losses_of(again / "checkpoint-6") == [MARK, *losses[1:]], "it has started anew"
    # What was saved answers alike, on one rank, without the training.
    alone = ["--do_eval", "--no_cuda", "--model", str(whole), "--output_dir", str(tmp_path / "alone")]
    assert ranks.run(1, on_rank, alone)[0] == pytest.approx(first[0])
    made = json.loads((tmp_path / "alone" / "predictions.json").read_text())
    assert made == json.loads((whole / "predictions.json").read_text()) and len(made) == 120


@pytest.mark.parametrize("algorithm", [row.name for row in bagua.algorithms.available()])
def test_every_algorithm(ranks: Loops, tmp_path: Path, algorithm: str) -> None:
    words = [*SMALLEST, "--algorithm", algorithm, "--max_steps", "4", "--save_steps", "4", "--logging_steps", "1"]
    words += ["--max_seq_length", "128", "--doc_stride", "64", "--async-sync-interval", "0"]
    if algorithm == "gradient_allreduce":
        words += ["--fuse-optimizer", "--fp16", "--evaluate_during_training"]
    found = ranks.run(2, on_rank, [*words, "--output_dir", str(tmp_path)])
    assert found[0] == found[1]
    losses = losses_of(tmp_path / "checkpoint-4")
    assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)
    assert sum("eval_f1" in each for each in history(tmp_path / "checkpoint-4")) == (
        4 if algorithm == "gradient_allreduce" else 0
    )


def test_old_checkpoints_go(ranks: Loops, tmp_path: Path) -> None:
    """They would be rotated, and resumed from, instead of those of this run."""
    (tmp_path / "checkpoint-1000").mkdir()
    (tmp_path / "file").touch()
    words = [*SMALLEST, "--do_train", "--max_steps", "2", "--save_steps", "1", "--overwrite_output_dir"]
    assert ranks.run(2, on_rank, [*words, "--output_dir", str(tmp_path)]) == [{}, {}]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    assert (tmp_path / "file").exists()


def test_questions_without_an_answer(ranks: Loops, tmp_path: Path) -> None:
    """The second version of the format; a threshold decides."""
    file = tmp_path / "file.json"
    file.write_text(squad_text("dog", 7, impossible=True))
    words = [*SMALLEST, "--predict_file", str(file), "--version_2_with_negative", "--max_steps", "1"]
    for threshold, score in (("-1000000", 100.0), ("1000000", 0.0)):
        out = str(tmp_path / threshold)
        scores = ranks.run(2, on_rank, [*words, "--null_score_diff_threshold", threshold, "--output_dir", out])
        assert scores[0] == {"exact": score, "f1": score, "total": 1.0}


def test_it_learns(ranks: Loops, tmp_path: Path) -> None:
    """A few questions by heart."""
    file = tmp_path / "file.json"
    articles = json.loads((FOLDER / "tiny-train.json").read_text())["data"][:2]
    file.write_text(json.dumps({"data": articles}))
    words = [*SMALLEST, "--hidden_size", "64", "--dropout", "0", "--max_steps", "50", "--learning_rate", "0.005"]
    words += ["--train_file", str(file), "--predict_file", str(file), "--algorithm", "bytegrad", "--save_steps", "50"]
    words += [
        "--logging_steps",
        "5",
        "--per_gpu_train_batch_size",
        "6",
        "--evaluate_during_training",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    found = ranks.run(2, on_rank, words)
    losses = losses_of(tmp_path / "out" / "checkpoint-50")
    scores = [each["eval_f1"] for each in history(tmp_path / "out" / "checkpoint-50") if "eval_f1" in each]
    assert len(losses) == len(scores) == 10
    assert losses[-1] < losses[0] / 3 and scores[-1] > max(90, scores[0] + 20), (losses, scores)
    assert found[0]["f1"] == scores[-1]


def test_flags_of_the_original_with_a_saved_bert(ranks: Loops, tmp_path: Path) -> None:
    """As the original's own script is called."""
    write_squad(tmp_path / "train.json", 48)
    write_squad(tmp_path / "dev.json", 8)
    write_bert(tmp_path / "bert")  # with a vocab.txt
    run = next(run for run in all_runs() if run.example == "squad")
    words = f"{run.flags} {run.size} --no_cuda".format(data=tmp_path, here=tmp_path).split()
    assert ranks.run(2, on_rank, words)[0]["total"] == 8
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["hidden_size"] == 32 and saved["model_type"] == "bert"
    # The word pieces alone, for a model from nothing.
    words = [*SMALLEST, "--tokenizer_name", str(tmp_path / "bert" / "vocab.txt"), "--max_steps", "1"]
    files = ["--train_file", str(tmp_path / "train.json"), "--predict_file", str(tmp_path / "dev.json")]
    ranks.run(1, on_rank, [*words, *files, "--output_dir", str(tmp_path / "new")])
    pieces = len((tmp_path / "bert" / "vocab.txt").read_text().splitlines())
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == pieces


def test_another_kind_of_model_is_refused(ranks: Loops, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    words = ["--do_eval", "--no_cuda", "--model", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(AssertionError, match="its type is 'gpt2', not 'bert'"):
        ranks.run(1, on_rank, words)


def test_a_profile_ends_the_training(ranks: Loops, tmp_path: Path) -> None:
    words = [*SMALLEST, "--prof", "2", "--max_steps", "99", "--do_train", "--output_dir", str(tmp_path)]
    first, second = ranks.run(2, printed, words)
    assert "Self CPU time total" in first and "Self CPU time total" not in second
    assert f"{11 / 23:.4g}" in first, "epochs of 23 steps"


@pytest.mark.slow
def test_it_answers_about_others_under_the_launcher(tmp_path: Path) -> None:
    words = ["-W", "ignore", "-m", "bagua.cli.main", "run", "--nproc-per-node", "2", "examples/squad/main.py"]
    done = start(*words, "--no_cuda", "--algorithm", "bytegrad", "--output_dir", tmp_path, wait_s=800)
    assert done.returncode == 0, done.stderr
    *_, sent, _, scores = done.stdout.splitlines()
    assert sent.startswith("bytegrad: ") and "compression 3.9" in sent
    assert scores.startswith("exact match ")
    assert float(scores.split("F1 ")[1].split(" %")[0]) > 70, scores
