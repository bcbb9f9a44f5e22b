"""Question answering, what needs no transformers: scores are SQuAD's, and files and flags are checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.examples.squad import FOLDER, load, run_script, squad_text


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


@pytest.mark.parametrize("name", ["train", "dev"])
def test_the_bundled_files_are_right(name: str) -> None:
    questions = load("squad_file").read_questions(FOLDER / f"tiny-{name}.json")
    assert len(questions) == {"train": 360, "dev": 120}[name]
    if name == "dev":
        known = {q.context for q in load("squad_file").read_questions(FOLDER / "tiny-train.json")}
        assert not known & {question.context for question in questions}


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
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"needs transformers: pip install 'bagua\[transformers\]'"):
        run_script(["--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
