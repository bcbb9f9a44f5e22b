"""The image script learns, resumes to the same scores, and reads folders of images."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.scripts import ROOT, needs
from tests.rank_pool import RankPool

pytestmark = needs("sklearn")

SMALLEST = ["--no-cuda", "--scale", "0.0625", "--batch-size", "128", "--image-size", "32", "--epochs", "2"]


def load(name: str) -> Any:
    """Import a script of examples/, with those beside it."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "examples"))


def run_script(words: list[str]) -> tuple[float, ...]:
    """On a rank."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return tuple(load("image_classification").main(words))
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.mark.slow  # resuming: tests/checkpoint
def test_a_resumed_run_gets_the_same_scores(pool: RankPool, tmp_path: Path) -> None:
    words = [*SMALLEST, "--algorithm", "bytegrad", "--save-checkpoint", str(tmp_path), "--resume", str(tmp_path)]
    first = pool.run(2, run_script, words)
    assert first[0] == first[1]
    newest = max(path for path in tmp_path.iterdir() if path.is_dir())
    shutil.rmtree(newest)
    assert pool.run(2, run_script, words) == first
    done = pool.run(2, run_script, [*words, "--evaluate"])
    assert done[0] == pytest.approx(first[0])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["async", "decentralized", "qadam"])
def test_other_algorithms(pool: RankPool, algorithm: str) -> None:
    words = [*SMALLEST, "--algorithm", algorithm, "--amp", "--async-sync-interval", "10"]
    scores = pool.run(2, run_script, words)
    assert scores[0] == scores[1]


@pytest.mark.slow
def test_it_learns(pool: RankPool) -> None:
    loss, top1, top5 = pool.run(2, run_script, ["--no-cuda"], timeout_s=150)[0]
    assert loss < 0.5 and top1 > 85 and top5 > 98


def folder_of_images(path: Path) -> Path:
    """Two classes: red is upper, blue is lower in the order of names."""
    image = pytest.importorskip("PIL.Image")
    for part, number in (("train", 8), ("val", 3)):
        for name, color in (("a red", (250, 10, 10)), ("b blue", (10, 10, 250))):
            folder = path / part / name
            folder.mkdir(parents=True)
            for index in range(number):
                image.new("RGB", (50 + index, 40), color).save(folder / f"{index}.jpeg", quality=95)
    return path


def test_a_folder_of_images(pool: RankPool, tmp_path: Path) -> None:
    folder = folder_of_images(tmp_path / "data")
    scores = pool.run(2, run_script, [str(folder), *SMALLEST, "--batch-size", "4", "--epochs", "1"])
    assert scores[0] == scores[1]
    assert scores[0][2] == pytest.approx(100), "both of two classes are among the first five"


def test_crops_and_labels(tmp_path: Path) -> None:
    module = load("image_folder")
    folder = folder_of_images(tmp_path)
    torch.manual_seed(0)
    data = module.ImageFolder(folder / "train", module.random_crop(24))
    assert data.classes == ["a red", "b blue"] and len(data) == 16
    red, label = data[0]
    assert red.shape == (3, 24, 24) and label == 0
    # 250 / 255 and 10 / 255, less the mean, by the deviation; JPEG rounds a little.
    assert red.mean((1, 2)).tolist() == pytest.approx([2.16, -1.86, -1.63], abs=0.1)
    assert data[15][1] == 1
    image = importlib.import_module("PIL.Image").new("RGB", (70, 35))
    image.paste((255, 255, 255), (35, 0, 70, 35))  # the right half is white
    middle = module.center_crop(28)(image)
    assert middle.size == (28, 28)
    assert middle.getpixel((2, 14)) == (0, 0, 0) and middle.getpixel((25, 14)) == (255, 255, 255)


def test_an_empty_folder(tmp_path: Path) -> None:
    module = load("image_folder")
    with pytest.raises(FileNotFoundError, match="expected a folder of images for each class"):
        module.ImageFolder(tmp_path / "train", module.center_crop(8))


def test_learning_rate() -> None:
    script = load("image_classification")
    args = script.build_parser().parse_args(["--epochs", "9", "--warmup-epochs", "1", "--gama", "0.5"])
    factor = script.rate(args, 10)
    assert factor(0) == pytest.approx(0.1) and factor(9) == 1 and factor(59) == 1
    assert (factor(60), factor(70), factor(80)) == (0.5, 0.25, 0.125)
    args.milestones = "1,2"
    assert script.rate(args, 10)(20) == 0.25


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    script = load("image_classification")
    with pytest.raises(SystemExit, match="DIR: .*nowhere/train: expected a folder of images for each class"):
        script.load_data(script.build_parser().parse_args([str(tmp_path / "nowhere"), "--image-size", "32"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "resnet19"], "'resnet19' is unknown"),
        (["--arch", "bert_base"], "bert_base reads text"),
        (["--scale", "9"], "scale: expected a number > 0"),
    ],
)
def test_refusals(words: list[str], message: str) -> None:
    script = load("image_classification")
    with pytest.raises(SystemExit, match=message):
        script.make_model(script.build_parser().parse_args(["--scale", "1", *words]), 10)
