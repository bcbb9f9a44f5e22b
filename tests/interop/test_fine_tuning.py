"""LoRA adapters (PEFT) and supervised fine-tuning (TRL) with Bagua's Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.interop.conftest import Loops

for _package in ("transformers", "accelerate", "peft", "trl"):
    pytest.importorskip(_package, reason=f"needs {_package}; `make test-interop` runs it")
pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

from tests.interop import fine_tuning_runs as runs  # noqa: E402


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "local_sgd"])
def test_adapters_alone_are_exchanged(loops: Loops, tmp_path: Path, algorithm: str) -> None:
    for rank in loops.run(2, runs.adapters, str(tmp_path), algorithm):
        assert rank["unchanged"] and rank["trainable"] < rank["all"] / 4
        if algorithm == "gradient_allreduce":
            assert rank["bytes"] == pytest.approx(4 * rank["trainable"] * rank["steps"], rel=0.01)
        torch.testing.assert_close(*rank["ranks"], rtol=0, atol=0)
        assert rank["again"] == rank["through"]
        assert {"adapter_model.safetensors", "bagua"} <= set(rank["files"]), rank["files"]


@pytest.mark.parametrize("lora", [False, True])
def test_supervised_fine_tuning_as_ddp(loops: Loops, tmp_path: Path, lora: bool) -> None:
    ddp = loops.run(2, runs.fine_tune, str(tmp_path), None, lora)
    ours = loops.run(2, runs.fine_tune, str(tmp_path), "gradient_allreduce", lora)
    for theirs, mine in zip(ddp, ours, strict=True):
        assert theirs["wrapped"] == "DistributedDataParallel" != mine["wrapped"]
        assert len(mine["losses"]) == 6
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-3)
        assert mine["bytes"] == pytest.approx(4 * mine["trainable"] * 6, rel=0.02)
