"""Accelerate with Bagua: as DDP where gradients are averaged, and what the algorithms add."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.conftest import Loops

pytest.importorskip("accelerate", reason="needs accelerate; `make test-interop` runs it")
pytest.importorskip("transformers", reason="needs transformers; `make test-interop` runs it")
pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

from tests.interop import accelerate_runs as runs  # noqa: E402
from tests.interop.test_transformers import ALGORITHMS  # noqa: E402

SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation and clipping": {},
    "every batch": {"gradient_accumulation_steps": 1},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_as_ddp(loops: Loops, setting: str) -> None:
    ddp = loops.run(2, runs.train, None, SETTINGS[setting])
    ours = loops.run(2, runs.train, "gradient_allreduce", SETTINGS[setting])
    for theirs, mine in zip(ddp, ours, strict=True):
        assert theirs["wrapped"] == "DistributedDataParallel" and mine["wrapped"] == "BertForSequenceClassification"
        assert mine["steps"] == runs.STEPS
        for what in ("losses", "norms", "rates"):
            assert mine[what] == pytest.approx(theirs[what], rel=1e-4), what
    torch.testing.assert_close(ours[0]["weights"], ours[1]["weights"], rtol=0, atol=0)


def test_bytes_and_bf16(loops: Loops) -> None:
    exact = loops.run(2, runs.train, "gradient_allreduce", {})[0]
    every_batch = loops.run(2, runs.train, "gradient_allreduce", {"gradient_accumulation_steps": 1})[0]
    half = loops.run(2, runs.train, "bytegrad", {"mixed_precision": "bf16"})[0]
    assert exact["bytes"] == every_batch["bytes"], "batches that are accumulated send nothing"
    assert exact["bytes"] / half["bytes"] == pytest.approx(4, rel=0.05)
    assert half["losses"] != exact["losses"] and half["losses"] == pytest.approx(exact["losses"], rel=0.2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_training_goes_on_as_if_it_had_not_ended(loops: Loops, tmp_path: Path, algorithm: str) -> None:
    options = {"codec": "int4"} if algorithm == "bytegrad" else {}
    for rank in loops.run(2, runs.resume, str(tmp_path), algorithm, options):
        assert rank["again"] == rank["through"]
        assert rank["complete"] and rank["same"], "the model's file holds all weights"


def test_a_checkpoint_without_bagua(loops: Loops, tmp_path: Path) -> None:
    first, second = loops.run(2, runs.load_in_the_middle, str(tmp_path))
    assert first["same"] and second["same"]
    assert any("was made without Bagua; diloco starts anew" in message for message in first["messages"])


def test_objects_prepared_one_by_one(loops: Loops) -> None:
    for rank in loops.run(2, runs.one_by_one):
        assert rank["steps"] == 3 and rank["bytes"] > 0
        assert len(rank["plain"]) == 2 and all("is not distributed" in said for said in rank["plain"])
        torch.testing.assert_close(*rank["weights"], rtol=0, atol=0)


def test_two_models(loops: Loops) -> None:
    for rank in loops.run(2, runs.two_models):
        assert rank["steps"] == [2, 2] and rank["again"] == [False, False]
        for ranks in rank["ranks"]:
            torch.testing.assert_close(*ranks, rtol=0, atol=0)


@pytest.mark.parametrize("algorithm", ["local_sgd", "async"])
def test_evaluation_sees_one_model_that_stays(loops: Loops, algorithm: str) -> None:
    for rank in loops.run(2, runs.evaluate, algorithm):
        torch.testing.assert_close(*rank["at_begin"], rtol=0, atol=0)
        for begin, end in zip(rank["at_begin"], rank["at_end"], strict=True):
            torch.testing.assert_close(begin, end, rtol=0, atol=0)
        if algorithm == "local_sgd":
            mean = torch.stack(rank["before"]).mean(0)
            assert not torch.equal(*rank["before"])
            torch.testing.assert_close(rank["at_begin"][0], mean)


def test_tied_weights_are_saved_once(loops: Loops, tmp_path: Path) -> None:
    for rank in loops.run(2, runs.save_tied, str(tmp_path)):
        assert rank["same"]
        assert rank["stored"] == rank["bytes"]


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized", "local_sgd"])
def test_a_training_of_tied_weights_is_resumed(loops: Loops, tmp_path: Path, algorithm: str) -> None:
    for rank in loops.run(2, runs.resume_tied, str(tmp_path), algorithm):
        assert rank["through"]["tied"] and rank["again"]["tied"]
        torch.testing.assert_close(rank["again"]["weights"], rank["through"]["weights"], rtol=0, atol=0)


def test_all_ranks_hear_of_a_rank_that_cannot_save_or_load(loops: Loops, tmp_path: Path) -> None:
    first, second = loops.run(2, runs.fail_on_one_rank, str(tmp_path))
    file = f"{tmp_path}/0/model.safetensors is damaged: it has "
    assert first["said"][0] == "OSError: no space left"
    assert second["said"][0] == (
        f"CheckpointError: saving the state to {tmp_path}/first: rank 0 of 2: OSError: no space left"
    )
    assert first["said"][1].startswith(f"CheckpointError: {file}")
    assert second["said"][1].startswith(
        f"CheckpointError: loading the state from {tmp_path}/1: rank 0 of 2: CheckpointError: {file}"
    )
    assert first["steps"] == second["steps"] == 1, "the models are distributed anew, and train"
