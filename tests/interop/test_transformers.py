"""The Trainer with Bagua: as DDP where gradients are averaged, and what the algorithms add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.conftest import Loops

pytest.importorskip("transformers", reason="needs transformers; `make test-interop` runs it")
pytest.importorskip("accelerate", reason="needs accelerate; `make test-interop` runs it")
pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

from tests.interop import trainer_runs as runs  # noqa: E402

ALGORITHMS = [
    *("gradient_allreduce", "bytegrad", "decentralized", "diloco", "local_sgd", "low_precision_decentralized"),
    *("qadam", "one_bit_lamb", "power_sgd", "zero_one_adam"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation and clipping": {},
    "every batch": {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_as_ddp(loops: Loops, tmp_path: Path, setting: str) -> None:
    changes = SETTINGS[setting]
    ddp = loops.run(2, runs.train, str(tmp_path), None, changes)
    ours = loops.run(2, runs.train, str(tmp_path), "gradient_allreduce", changes)
    for theirs, mine in zip(ddp, ours, strict=True):
        assert theirs["wrapped"] == "DistributedDataParallel" and mine["wrapped"] == "BertForSequenceClassification"
        assert len(mine["losses"]) == runs.STEPS and mine["steps"] == runs.STEPS
        for what in ("losses", "norms", "eval_losses"):
            assert mine[what] == pytest.approx(theirs[what], rel=1e-4), what
        torch.testing.assert_close(mine["weights"], theirs["weights"], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours[0]["weights"], ours[1]["weights"], rtol=0, atol=0)


def test_bf16_is_not_full_precision(loops: Loops, tmp_path: Path) -> None:
    full = loops.run(2, runs.train, str(tmp_path), "gradient_allreduce", {})
    half = loops.run(2, runs.train, str(tmp_path), "gradient_allreduce", {"bf16": True})
    assert half[0]["losses"] != full[0]["losses"]
    assert half[0]["losses"] == pytest.approx(full[0]["losses"], rel=0.1)


def test_bytes(loops: Loops, tmp_path: Path) -> None:
    exact = loops.run(2, runs.train, str(tmp_path), "gradient_allreduce", {})[0]
    every_batch = loops.run(2, runs.train, str(tmp_path), "gradient_allreduce", {"gradient_accumulation_steps": 1})[0]
    compressed = loops.run(2, runs.train, str(tmp_path), "bytegrad", {})[0]
    assert exact["bytes"] == every_batch["bytes"], "batches that are accumulated send nothing"
    assert exact["bytes"] == pytest.approx(exact["params"] * 4 * runs.STEPS, rel=0.01)
    assert exact["bytes"] / compressed["bytes"] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_training_goes_on_as_if_it_had_not_ended(loops: Loops, tmp_path: Path, algorithm: str) -> None:
    ranks = loops.run(2, runs.resume, str(tmp_path), algorithm, {})
    for rank in ranks:
        assert rank["again"] == rank["through"]
    torch.testing.assert_close(ranks[0]["weights"], ranks[1]["weights"], rtol=0, atol=0)


def test_residuals_are_resumed(loops: Loops, tmp_path: Path) -> None:
    for rank in loops.run(2, runs.resume, str(tmp_path), "bytegrad", {"bf16": True}, {"codec": "int4"}):
        assert rank["again"] == rank["through"]
    (files,) = (tmp_path / "checkpoint-3" / "bagua").iterdir()
    assert {path.name for path in files.iterdir()} == {
        "algorithm_0-00000.pt",
        "algorithm_0-00001.pt",
        "checkpoint.json",
    }, "what the ranks hold alike is in the Trainer's own files"


@pytest.mark.parametrize(
    ("saved_with", "algorithm", "said"),
    [
        (None, "diloco", "was made without Bagua; diloco starts anew"),
        ("local_sgd", "bytegrad", "the checkpoint was made with LocalSGD"),
        ("bytegrad", "local_sgd", "the checkpoint was made with ByteGrad"),
    ],
)
def test_another_algorithm_starts_anew(
    loops: Loops, tmp_path: Path, saved_with: str | None, algorithm: str, said: str
) -> None:
    first, second = loops.run(2, runs.resume_from, str(tmp_path), saved_with, algorithm)
    assert any(said in message for message in first["messages"]), first["messages"]
    assert second["messages"] == [] and first["finite"] and len(first["losses"]) == 3


@pytest.mark.parametrize(("algorithm", "options"), [("bytegrad", {"codec": "int4"}), ("local_sgd", {}), ("diloco", {})])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_another_number_of_ranks(
    loops: Loops, tmp_path: Path, algorithm: str, options: dict[str, Any], sizes: tuple[int, int]
) -> None:
    saved = loops.run(sizes[0], runs.save_half, str(tmp_path), algorithm, options)[0]
    for rank in loops.run(sizes[1], runs.go_on, str(tmp_path), algorithm, options):
        assert rank["finite"] and rank["steps"] == runs.STEPS and rank["messages"] == []
        torch.testing.assert_close(rank["first"], saved, rtol=1e-6, atol=1e-7)
        for weights in rank["ranks"]:
            torch.testing.assert_close(weights, rank["ranks"][0], rtol=0, atol=0)
