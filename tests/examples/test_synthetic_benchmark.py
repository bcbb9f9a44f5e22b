"""Models have their published sizes; rates, intervals and flags of the benchmark are right."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bagua.sys_perf.catalogue import choose
from bagua.sys_perf.main import main
from bagua.sys_perf.models import VGG16, Bert, BertConfig, BertForPreTraining, ResNet
from bagua.sys_perf.rates import interval
from tests.examples.scripts import start
from tests.rank_pool import RankPool

SMALLEST = ["--no-cuda", "--scale", "0.0625", "--batch-size", "2", "--image-size", "32", "--seq-length", "8"]
SMALLEST += ["--num-iters", "2", "--num-batches-per-iter", "1", "--num-warmup-batches", "2", "--source", "own"]


def count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    ("make", "elements"),
    [
        (VGG16, 138_357_544),  # arXiv:1409.1556, table 2: 138 M; torchvision's vgg16
        (lambda: ResNet(18), 11_689_512),  # torchvision's, as the next four
        (lambda: ResNet(34), 21_797_672),
        (lambda: ResNet(50), 25_557_032),
        (lambda: ResNet(101), 44_549_160),
        (lambda: ResNet(152), 60_192_808),
        (lambda: Bert(BertConfig()), 335_141_888),  # bert-large-uncased without heads
        (lambda: Bert(BertConfig.base()), 109_482_240),  # bert-base-uncased without heads
        (lambda: BertForPreTraining(BertConfig()), 336_226_108),
    ],
)
def test_number_of_parameters(make: Any, elements: int) -> None:
    with torch.device("meta"):
        assert count(make()) == elements


def test_narrower_models_compute() -> None:
    images = torch.randn(2, 3, 40, 32)
    for model in (VGG16(10, scale=1 / 16), ResNet(18, 10, scale=1 / 16), ResNet(50, 10, scale=1 / 16)):
        assert model(images).shape == (2, 10)
    words, follows = BertForPreTraining(BertConfig(50, 32, 2, 4, 64, 16))(torch.randint(50, (3, 16)))
    assert words.shape == (3, 16, 50) and follows.shape == (3, 2)


def test_bert_does_not_see_padding_and_knows_places() -> None:
    torch.manual_seed(0)
    model = Bert(BertConfig(50, 32, 2, 4, 64, 16)).eval()
    tokens = torch.randint(1, 50, (1, 8))
    mask = torch.tensor([[True] * 6 + [False] * 2])
    changed = tokens.clone()
    changed[0, 6:] = 7
    torch.testing.assert_close(model(tokens, mask=mask)[:, :6], model(changed, mask=mask)[:, :6])
    torch.testing.assert_close(model(tokens, mask=mask)[:, :6], model(tokens[:, :6]))
    assert not torch.allclose(model(tokens), model(tokens.flip(1)).flip(1))
    with pytest.raises(ValueError, match="17 in a sequence, max_positions is 16"):
        model(torch.ones(1, 17, dtype=torch.int64))


@pytest.mark.parametrize("name", ["hidden_size", "num_layers"])
def test_impossible_sizes(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        BertConfig(**{name: 0 if name == "num_layers" else 1000})


def test_interval() -> None:
    found = interval(torch.tensor([1.0, 3.0], dtype=torch.float64))
    assert found == (2.0, 1.96)
    assert str(found) == "2.0 +-2.0"


@pytest.mark.parametrize(
    ("name", "source", "scale", "message"),
    [
        ("vgg17", "own", 1.0, "'vgg17' is unknown; built in: vgg16, resnet18"),
        ("vgg16", "library", 0.5, "0.5 needs the built-in definitions"),
        ("vgg16", "mine", 1.0, "expected one of auto, own, library"),
        ("resnet50", "own", 0.0, "scale: expected a number > 0"),
        ("bert_large", "own", 5.0, "scale: expected a number > 0"),
    ],
)
def test_wrong_models(name: str, source: str, scale: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(name, source, scale).make()


def test_an_installed_library_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the names of torchvision's that are used."""
    made: list[Any] = []
    models = types.ModuleType("torchvision.models")
    models.list_models = lambda module: ["resnet50", "alexnet"]  # type: ignore[attr-defined]
    models.get_model = lambda name, **options: made.append((name, options)) or nn.Linear(1, 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    assert choose("alexnet").source == "torchvision"
    choose("resnet50").make()
    assert made == [("resnet50", {"weights": None, "num_classes": 1000})]
    assert choose("resnet50", scale=0.5).source == "own"
    assert choose("resnet50", "own").source == "own"
    assert choose("vgg16").source == "own"  # this one does not have it
    with pytest.raises(ValueError, match="has no 'vgg16'"):
        choose("vgg16", "library")


def printed(words: list[str]) -> str:
    """On a rank: what the benchmark prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        run_script(words)
    return text.getvalue()


@pytest.mark.slow
def test_under_the_launcher(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["-m", "bagua.distributed.run", "--nproc-per-node", "2", "examples/synthetic_benchmark.py"]
    done = start(*words, *SMALLEST, "--model", "resnet18", "--json", file)
    assert done.returncode == 0, done.stderr
    check(file, done.stdout)


def test_what_two_ranks_print_and_write(pool: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    text, nothing = pool.run(2, printed, ["--model", "resnet18", "--json", str(file)])
    assert not nothing, "one rank prints"
    check(file, text)


def check(file: Path, text: str) -> None:
    result = json.loads(file.read_text())
    assert result["ranks"] == 2 and len(result["per_rank"]) == 2 and result["unit"] == "img"
    assert result["total"]["mean"] == pytest.approx(sum(each["mean"] for each in result["per_rank"]))
    lines = text.splitlines()
    assert "Number of CPUs: 2, 1 threads each" in lines
    assert sum(line.startswith("Iter #") and line.endswith("img/sec CPU") for line in lines) == 2
    assert any(line.startswith("Img/sec per CPU: ") and " +-" in line for line in lines)
    assert any(line.startswith("Total img/sec on 2 CPU(s): ") for line in lines)


def run_script(words: list[str]) -> None:
    """On a rank."""
    assert main([*SMALLEST, *words]) == 0


@pytest.mark.parametrize("model", ["resnet18", pytest.param("bert_base", marks=pytest.mark.slow)])
def test_deterministic_runs_repeat_and_fp16_halves_the_bytes(pool: RankPool, tmp_path: Path, model: str) -> None:
    results = []
    for more in ([], [], ["--fp16-allreduce"]):
        file = tmp_path / f"{len(results)}.json"
        pool.run(2, run_script, ["--model", model, "--deterministic", "--json", str(file), *more])
        results.append(json.loads(file.read_text()))
    assert results[0]["final_loss"] == results[1]["final_loss"]
    assert results[2]["mb_sent_per_step"] == pytest.approx(results[0]["mb_sent_per_step"] / 2, rel=0.01)
    expected = 4 * results[0]["parameters"] / 1e6  # of a ring of two ranks: (R - 1) / R of the gradients, twice
    assert results[0]["mb_sent_per_step"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "more",
    [
        ["--algorithm", "qadam", "--amp"],
        ["--algorithm", "async", "--async-sync-interval", "10"],
        ["--fuse-optimizer", "--use-adasum"],
    ],
)
def test_other_flags(pool: RankPool, more: list[str]) -> None:
    pool.run(2, run_script, ["--model", "resnet18", *more])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "bytegrad", "--fp16-allreduce"], "goes with --algorithm gradient_allreduce"),
        (["--algorithm", "qadam", "--fuse-optimizer"], "the optimizer of qadam cannot be fused"),
        (["--algorithm", "async", "--deterministic"], "async cannot be deterministic"),
        (["--num-iters", "0"], "must be at least 1, not 0"),
        (["--image-size", "16"], "expected at least 32 pixels"),
        (["--model", "bert_large", "--seq-length", "513"], "expected 2 to 512 tokens"),
        (["--model", "lenet"], "'lenet' is unknown"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SMALLEST, *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
