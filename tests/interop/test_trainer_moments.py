"""The Trainer with Bagua: evaluation, saving, the end of a training, wrong arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.interop.conftest import Loops

pytest.importorskip("transformers", reason="needs transformers; `make test-interop` runs it")
pytest.importorskip("accelerate", reason="needs accelerate; `make test-interop` runs it")
pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

from tests.interop import trainer_moments as runs  # noqa: E402
from tests.interop import trainer_runs  # noqa: E402


@pytest.mark.parametrize("algorithm", ["local_sgd", "decentralized", "async"])
def test_evaluation_sees_the_mean_of_the_replicas(loops: Loops, tmp_path: Path, algorithm: str) -> None:
    ranks = loops.run(2, runs.evaluate, str(tmp_path), algorithm)
    for rank in ranks:
        batches = len(rank["during"]) // 2
        assert batches > 4 and len(rank["before"]) == 2
        for number, weights in enumerate(rank["during"]):
            torch.testing.assert_close(*weights, rtol=0, atol=0)
            torch.testing.assert_close(weights, rank["during"][number // batches * batches], rtol=0, atol=0)
            if algorithm != "async":  # a round may end between the callback and the evaluation
                mean = torch.stack(rank["before"][number // batches]).mean(0)
                torch.testing.assert_close(weights[0], mean)
        torch.testing.assert_close(*rank["at_end"], rtol=0, atol=0)
    assert ranks[0]["losses"] == ranks[1]["losses"] and len(ranks[0]["losses"]) == 2


@pytest.mark.parametrize("algorithm", ["bytegrad", "local_sgd", "async"])
def test_the_best_model_and_what_follows(loops: Loops, tmp_path: Path, algorithm: str) -> None:
    for rank in loops.run(2, runs.best, str(tmp_path), algorithm):
        assert rank["same"] and rank["plain"] and rank["predicted"] == 8
        assert rank["steps"] == [trainer_runs.STEPS] * 2
        assert rank["final"]
        torch.testing.assert_close(*rank["ranks"], rtol=0, atol=0)


def test_tied_weights_are_saved_once(loops: Loops, tmp_path: Path) -> None:
    for rank in loops.run(2, runs.save_tied, str(tmp_path)):
        assert rank["moved"] and rank["same"] and rank["tied"]
        assert rank["expected"] < rank["nbytes"] < rank["expected"] + 5000


def test_what_cannot_work_is_refused(loops: Loops, tmp_path: Path) -> None:
    expected = {
        "wrapped": "ValueError: module: it is a torch DistributedDataParallel, which exchanges gradients itself",
        "option": "codex",
        "algorithm": "bytegrap",
        "group": "TypeError: process_group: not an option here",
        "tolerant": "TypeError: fault_tolerant: not an option here",
        "fsdp": "ValueError: BaguaTrainer: Accelerate is configured for FSDP",
        "cpu": "RuntimeError: TrainingArguments counts 1 process, and the process group has 2; start the ranks with",
    }
    for said in loops.run(2, runs.refused, str(tmp_path)):
        for name, words in expected.items():
            assert words in said[name], said[name]
    assert "QAdam" in loops.run(2, runs.optimizer_missing, str(tmp_path))[1]


def test_a_training_after_one_that_failed(loops: Loops, tmp_path: Path) -> None:
    for rank in loops.run(2, runs.callback_fails, str(tmp_path)):
        assert not rank["armed"] and rank["steps"] == trainer_runs.STEPS
        torch.testing.assert_close(*rank["ranks"], rtol=0, atol=0)


def test_compiled(loops: Loops, tmp_path: Path) -> None:
    plain = loops.run(2, trainer_runs.train, str(tmp_path), "gradient_allreduce", {"max_steps": 3})
    for theirs, rank in zip(plain, loops.run(2, runs.compiled, str(tmp_path)), strict=True):
        assert rank["kind"] == "OptimizedModule"
        assert rank["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
        assert rank["bytes"] == theirs["bytes"] and rank["steps"] == 3
        assert rank["plain"] and not rank["distributed"], rank["messages"]


def test_one_process_alone(loops: Loops, tmp_path: Path) -> None:
    (alone,) = loops.run(1, trainer_runs.train, str(tmp_path), "bytegrad", {})
    assert alone["steps"] == trainer_runs.STEPS and alone["bytes"] == 0


def test_a_callback_reports_metrics(loops: Loops, tmp_path: Path) -> None:
    for rank, seen in enumerate(loops.run(2, runs.reports_metrics, str(tmp_path))):
        assert seen == [(2, rank), (4, rank), (5, rank)]
