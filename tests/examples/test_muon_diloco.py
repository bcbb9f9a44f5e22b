"""The script with Muon inside DiLoCo runs with each choice."""

from __future__ import annotations

import re

import pytest
import torch

from tests.examples.scripts import load_script
from tests.rank_pool import RankPool


def run_script(words: list[str]) -> None:
    load_script("muon_diloco").main(words)


@pytest.mark.parametrize(
    "words", [["--interval", "2"], ["--algorithm", "gradient_allreduce", "--inner", "adamw"]], ids=["muon", "adamw"]
)
def test_two_ranks(pool: RankPool, words: list[str]) -> None:
    pool.run(2, run_script, ["--steps", "4", *words])


def test_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    run_script(["--steps", "2"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"diloco with muon: validation loss [\d.]+, 0.00 MB sent by a rank", last)


def test_every_parameter_has_one_optimizer() -> None:
    script = load_script("muon_diloco")
    model = script.ByteGPT()
    muon, adamw = script.make_optimizers(model, "muon")
    held = [id(p) for each in (muon, adamw) for group in each.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters()) and isinstance(muon, torch.optim.Muon)
