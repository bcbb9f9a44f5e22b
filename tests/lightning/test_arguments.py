"""What the strategy accepts, refuses and is called; no ranks needed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install '.[lightning]'")

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import bagua
from lightning_bagua import BaguaStrategy, register
from lightning_bagua.redirection import call_through_hooks
from tests.examples.scripts import ROOT, load_script, start
from tests.rank_pool import RankPool


@pytest.mark.filterwarnings("ignore:The .srun. command is available")
def test_the_name_is_known() -> None:
    strategy = Trainer(strategy="bagua", accelerator="cpu", devices=2, logger=False).strategy
    assert type(strategy) is BaguaStrategy and isinstance(strategy, DDPStrategy)
    assert strategy.num_processes == 2
    assert type(Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False).strategy) is DDPStrategy
    register()
    assert StrategyRegistry["bagua"]["strategy"] is BaguaStrategy


def test_the_originals_arguments_in_their_order() -> None:
    devices = [torch.device("cpu")]
    strategy = BaguaStrategy("decentralized", True, None, devices, None, None, None, peer_selection_mode="shift_one")
    assert strategy.parallel_devices == devices
    assert strategy._algorithm == bagua.algorithms.Decentralized(peer_selection_mode="shift_one")
    strategy = BaguaStrategy("bytegrad", bucket_bytes=1000, hierarchical=None, timeout=timedelta(seconds=7))
    assert strategy._engine_options == {"bucket_bytes": 1000} and strategy._timeout == timedelta(seconds=7)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"algorithm": "bytegrab"}, ValueError, "bytegrab.*available"),
        ({"algorithm": 3}, TypeError, "algorithm"),
        ({"flatten": False}, ValueError, "flatten"),
        ({"find_unused_parameters": True}, TypeError, "find_unused_parameters.*leave it out"),
        ({"ddp_comm_hook": print}, TypeError, "ddp_comm_hook"),
        ({"process_group": None}, TypeError, "process_group: Lightning"),
        ({"optimizers": []}, TypeError, "optimizers: Lightning"),
        ({"sync_interval_ms": 3}, ValueError, "gradient_allreduce.*no option 'sync_interval_ms'"),
        ({"algorithm": bagua.algorithms.ByteGrad(), "codec": "int4"}, ValueError, "codec"),
    ],
)
def test_nothing_is_dropped_silently(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        BaguaStrategy(**kwargs)


class Doubles(torch.nn.Module):
    def forward(self, x: int) -> int:
        return 2 * x

    def step(self, x: int) -> int:
        if x < 0:
            raise ValueError("negative")
        return self(x) + 1


def test_a_call_through_hooks_leaves_no_trace() -> None:
    module, seen = Doubles(), []
    module.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    assert call_through_hooks(module, "step", 3) == 7
    assert seen == [6, 7] and "forward" not in vars(module)
    with pytest.raises(ValueError, match="negative"):
        call_through_hooks(module, "step", -1)
    assert "forward" not in vars(module)
    module.forward = lambda x: 5 * x  # a forward of its own, as torch.compile leaves it
    assert call_through_hooks(module, "step", 3) == 16 and module(1) == 5


def other_package() -> tuple[str, bool, torch.Tensor]:
    """One epoch under the package's other name."""
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.environments import LightningEnvironment

    from lightning_bagua.for_pytorch_lightning import BaguaStrategy as Other

    class Line(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    register()
    by_name = pl.Trainer(strategy="bagua", accelerator="cpu", devices=2, logger=False).strategy
    torch.manual_seed(torch.distributed.get_rank())
    model = Line()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=Other("bytegrad", cluster_environment=LightningEnvironment()),
    )
    rows = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    trainer.fit(model, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2))
    return type(by_name).__module__, isinstance(by_name, BaguaStrategy), model.net.weight.detach()


@pytest.mark.slow
def test_pytorch_lightning(pool: RankPool) -> None:
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    (name, is_ours, one), (_, _, other) = pool.run(2, other_package)
    assert (name, is_ours) == ("lightning_bagua.for_pytorch_lightning", False)
    assert torch.equal(one, other)


@pytest.mark.process
def test_bagua_does_not_import_lightning() -> None:
    code = "import sys, bagua; print([name for name in sys.modules if 'lightning' in name])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def example(file: str) -> None:
    """One epoch of the example on this rank, whose processes exist already."""
    sys.path.insert(0, str(ROOT / "examples"))
    lightning_digits = importlib.import_module("lightning_digits")

    words = ["--algorithm", "bytegrad", "--devices", "2", "--accelerator", "cpu", "--epochs", "1", "--json", file]
    lightning_digits.main(words)


def test_the_example_in_its_smallest_form(pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn, of which the digits come, is not installed")
    pool.run(2, example, str(tmp_path / "result.json"))
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["ranks"], result["algorithm"], result["steps"]) == (2, "bytegrad", 22)
    assert result["test_accuracy"] > 0.3 and result["compression_ratio"] > 2


@pytest.mark.process
@pytest.mark.slow
def test_lightning_starts_the_processes_of_the_example(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn, of which the digits come, is not installed")
    words = ["--strategy", "bagua", "--algorithm", "bytegrad", "--devices", "2", "--accelerator", "cpu"]
    done = start("examples/lightning_digits.py", *words, "--epochs", "2", "--json", tmp_path / "result.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["ranks"], result["algorithm"]) == (2, "bytegrad")
    assert result["test_accuracy"] > 0.8 and result["compression_ratio"] > 2


@pytest.mark.parametrize("words", [["--algorithm", "bytegard"], ["--devices", "0"], ["--accumulate", "two"]])
def test_the_example_names_the_argument_that_is_wrong(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn, of which the digits come, is not installed")
    with pytest.raises(SystemExit):
        load_script("lightning_digits").build_parser().parse_args(words)
    assert f"argument {words[0]}: " in capsys.readouterr().err
