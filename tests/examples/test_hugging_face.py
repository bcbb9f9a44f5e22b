"""The examples with Hugging Face's Trainer and Accelerate, as their first lines say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.examples.scripts import ROOT, start
from tests.ports import free_port

for _package in ("transformers", "accelerate"):
    pytest.importorskip(_package, reason=f"needs {_package}; `make test-interop` runs it")
pytestmark = pytest.mark.timeout(900)
BAGUA = ("-W", "ignore", "-m", "bagua.cli.main", "run", "--nproc-per-node", "2")


def read(path: Path) -> dict[str, float]:
    return json.loads(path.read_text())


def test_trainer(tmp_path: Path) -> None:
    words = ("--steps", "24", "--batch-size", "16", "--json", tmp_path / "result.json")
    sent: dict[str, float] = {}
    for algorithm in ("gradient_allreduce", "bytegrad"):
        ran = start(*BAGUA, "examples/hf_trainer.py", "--algorithm", algorithm, *words, wait_s=400)
        assert ran.returncode == 0, ran.stderr
        assert re.search(rf"{algorithm} on 2 ranks: .* right after 24 steps", ran.stdout), ran.stdout
        sent[algorithm] = read(tmp_path / "result.json")["mb_sent_per_step"]
    assert sent["gradient_allreduce"] / sent["bytegrad"] == pytest.approx(4, rel=0.05)


def test_trainer_goes_on(tmp_path: Path) -> None:
    words = ("--algorithm", "local_sgd", "--batch-size", "8", "--checkpoints", tmp_path / "run")
    for steps in ("8", "12"):
        ran = start(*BAGUA, "examples/hf_trainer.py", *words, "--steps", steps, wait_s=400)
        assert ran.returncode == 0, ran.stderr
        assert f"right after {steps} steps" in ran.stdout
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    assert "checkpoint-12" in kept and len(kept) == 2


def test_accelerate(tmp_path: Path) -> None:
    launch = ("-W", "ignore", "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
    port = ("--main_process_port", str(free_port()))
    words = ("--algorithm", "bytegrad", "--batch-size", "8", "--checkpoints", tmp_path / "run")
    for steps in ("8", "12"):
        ran = start(*launch, *port, ROOT / "examples" / "accelerate_nlp.py", *words, "--steps", steps, wait_s=400)
        assert ran.returncode == 0, ran.stderr
        assert "bytegrad on 2 ranks: " in ran.stdout and f"right after {steps} steps" in ran.stdout, ran.stdout
    assert "goes on at step 8" in ran.stdout and "compression 3.9" in ran.stdout
