"""`bagua plan`: its table, its files and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua.plan import load_model
from bagua.plan.main import main
from bagua.plan.workload import work_of

SHORT = ["--model", "10m", "--hosts", "4", "--bandwidth", "1gbit", "--compute-ms", "50"]
FEW = ["--algorithms", "ddp;bytegrad;power_sgd:rank=2"]


def test_the_table_and_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert main([*SHORT, *FEW, "--json", str(file), "--host-price", "3.60usd/h"]) == 0
    printed, report = capsys.readouterr().out, json.loads(file.read_text())
    assert "predicted, not measured" in printed and "usd/1000 steps" in printed
    rows = {row["algorithm"]: row for row in report["rows"]}
    assert set(rows) == {"ddp", "bytegrad", "power_sgd:rank=2"}
    assert rows["ddp"]["speedup_to_ddp"] == 1.0 < rows["bytegrad"]["speedup_to_ddp"]
    for name, row in rows.items():
        assert name in printed
        # 4 hosts at a tenth of a cent a second
        assert row["cost_per_1000_steps"] == pytest.approx(1000 * 4 * row["step_ms"] / 1e3 * 0.001)
    assert report["cluster"]["bandwidth"] == 1e9 and report["compute"] == "given"


def test_compute_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hosts", "2", "--bandwidth", "10gbit", "--algorithms", "ddp"]
    assert main(["--model", "vgg16", *options, "--batch", "1", "--tflops", "1"]) == 0
    # 15.5 G multiply-adds forward (arXiv:1409.1556), two operations each, three times
    assert work_of(load_model("vgg16")) == pytest.approx(6 * 15.5e9, rel=0.01)
    assert "compute 92.8 ms a step (estimated: 1 samples at 1 TFLOP/s)" in capsys.readouterr().out
    assert main(["--model", "1b", *options, "--batch", "1000", "--tflops", "60"]) == 0
    assert "compute 100.0 ms a step (estimated: 1000 tokens" in capsys.readouterr().out


def test_an_algorithm_of_unknown_course(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("bagua.plan.main.DEFAULT_NAMES", ("ddp", "horovod"))
    assert main(SHORT) == 0
    assert "left out: algorithms: how 'horovod' spends a step is not known" in capsys.readouterr().out
    assert main([*SHORT, "--algorithms", "ddp,horovod"]) == 2, "what was asked for is not left out"
    assert "how 'horovod' spends a step is not known" in capsys.readouterr().err


def test_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*SHORT, *FEW, "--plot", str(tmp_path)]) == 0
    for name in ("bandwidth.svg", "scale.svg"):
        text = (tmp_path / name).read_text()
        assert "bytegrad" in text and "predicted, not measured" in text


def test_a_module_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n"
        "    with torch.device('meta'):\n"
        "        net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))\n"
        "    net.append(net[2])\n"
        "    net[0].bias.requires_grad_(False)\n"
        "    return net\n"
        "def fail():\n    raise RuntimeError('no memory')\n"
        "def other():\n    return 3\n"
        "def empty():\n    return nn.ReLU()\n"
    )
    model = load_model(f"{file}:make")
    assert [layer.shapes for layer in model.layers] == [((4, 8),), ((4, 4),)], "shared and frozen ones left out"
    for function, message in (
        ("fail", "does not build: RuntimeError: no memory"),
        ("missing", "it has no function 'missing'"),
        ("other", "returned int, not a torch.nn.Module"),
        ("empty", "has no parameters that are trained"),
    ):
        with pytest.raises(ValueError, match=message):
            load_model(f"{file}:{function}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "vgg17"], "model: 'vgg17' is unknown; expected one of layers25m, vgg16"),
        (["--model", "nothing.py:make"], "there is no file 'nothing.py'"),
        (["--model", "net.py"], "names no function"),
        (["--bandwidth", "10"], "--bandwidth must be a rate with a unit of bits"),
        (["--latency", "5"], "--latency must be a duration with a unit"),
        (["--host-price", "20"], "--host-price: expected a price with its unit, as 2.50usd/h, got '20'"),
        (["--host-price", "2eur/h", "--traffic-price", "1usd/gb"], "two currencies, eur and usd"),
        (["--traffic-price", "1usd/h"], "--traffic-price: expected a price with its unit, as 0.02usd/GB"),
        (["--algorithms", ","], "--algorithms: expected names, got ','"),
        (["--json", "/no/such/place.json"], "--json: /no/such/place.json: No such file or directory"),
        (["--algorithms", "nonsense"], "contender 'nonsense' is unknown"),
        (["--hosts", "5000", "--devices", "8"], "at most 16384 ranks"),
        (["--hosts", "0"], "hosts: expected a positive int, got 0"),
        (["--compute-ms", "-1"], "--compute-ms: expected milliseconds >= 0"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, *FEW, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bagua plan: ") and message in line
