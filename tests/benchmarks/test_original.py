"""The harness for the original's examples changes the device of a script, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.original.__main__ import _error, main
from benchmarks.original.data import write_mnist, write_squad
from benchmarks.original.device import to_cpu
from benchmarks.original.runs import ALGORITHMS, all_runs

SCRIPT = """\
torch.cuda.set_device(facade.get_local_rank())
net = Net(args.width).cuda()
a, b = a.cuda(), b.cuda(facade.get_local_rank(), non_blocking=True)
if torch.cuda.is_available():
    where = torch.device("cuda", facade.get_local_rank())
scaler = torch.cuda.amp.GradScaler(enabled=args.amp)
with torch.cuda.amp.autocast(enabled=args.amp):
    torch.distributed.barrier(device_ids=[facade.get_local_rank()])
torch.cuda.manual_seed(3)
name = "cuda:{}".format(facade.get_local_rank())
"""
ON_CPU = """\
None
net = Net(args.width)
a, b = a, b
if True:
    where = torch.device("cpu")
scaler = torch.amp.GradScaler("cpu", enabled=args.amp)
with torch.autocast("cpu", enabled=args.amp):
    torch.distributed.barrier()
torch.cuda.manual_seed(3)
name = "cpu"
"""


def test_the_device_is_changed_and_nothing_else() -> None:
    changed, lines = to_cpu(SCRIPT)
    assert changed == ON_CPU and lines == 9
    untouched = "model = model.with_bagua([optimizer], algorithm)\noptimizer.step()\n"
    assert to_cpu(untouched) == (untouched, 0)


def test_every_example_runs_with_every_algorithm() -> None:
    runs = all_runs()
    assert len({(run.example, run.flags) for run in runs}) == len(runs) > 32
    for example in ("benchmark", "mnist", "moe", "imagenet", "squad"):
        flags = " ".join(run.flags for run in runs if run.example == example)
        assert all(f"--algorithm {name}" in flags for name in ALGORITHMS)
    assert {run.example for run in runs} >= {"communication_primitives", "elastic_training"}


def test_synthetic_data_is_read_as_what_it_stands_for(tmp_path: Path) -> None:
    import json

    write_mnist(tmp_path, 8, 4)
    raw = tmp_path / "MNIST" / "raw"
    assert (raw / "train-images-idx3-ubyte").stat().st_size == 16 + 8 * 28 * 28
    assert (raw / "t10k-labels-idx1-ubyte").stat().st_size == 8 + 4
    write_squad(tmp_path / "train.json", 5)
    for paragraph in json.loads((tmp_path / "train.json").read_text())["data"][0]["paragraphs"]:
        (answer,) = paragraph["qas"][0]["answers"]
        assert paragraph["context"][answer["answer_start"] :].startswith(answer["text"])


def test_the_error_of_a_rank_is_named() -> None:
    output = "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: too short\ntorch.x.ChildFailedError: \n"
    assert _error(output) == "ValueError: too short"
    assert _error("killed") == "no exception was printed"


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--checkout", str(tmp_path)])
    assert "no folder 'examples'" in capsys.readouterr().err
