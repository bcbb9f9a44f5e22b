"""What loggers and files get. Objects with the methods of others' loggers stand for these; for the real ones see
tests/interop/test_metrics.py."""

from __future__ import annotations

import csv
import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua
from bagua.comm.team import Team
from bagua.engine import Series
from bagua.metrics import CSVFile, Logger, OpenTelemetry, Prometheus, TensorBoard, report, scalars
from bagua.metrics.catalogue import METRICS
from bagua.metrics.choice import as_sinks
from bagua.metrics.csv_file import COLUMNS
from tests.metrics.training import Loop
from tests.rank_threads import run_teams

ROOT = Path(__file__).parents[2]


class Writer:
    """As `torch.utils.tensorboard.SummaryWriter`."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int | None]] = []

    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        self.points.append((tag, scalar_value, global_step))


class Run:
    """As a run of Weights & Biases, which drops what goes back in steps."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], int]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        step = len(self.rows) if step is None else step
        if not self.rows or step >= self.rows[-1][1]:
            self.rows.append((data, step))


class LightningLogger:
    """As a logger of Lightning, whose `log` is of another kind."""

    def __init__(self) -> None:
        self.rows: list[tuple[Mapping[str, float], int | None]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((metrics, step))

    def log(self, name: str, value: float) -> None:
        raise AssertionError


@pytest.fixture
def loop() -> Iterator[Loop]:
    bagua.init_process_group()
    yield Loop(None, "bytegrad")
    bagua.destroy_process_group()


def test_loggers_get_a_flat_dict_with_the_step(loop: Loop) -> None:
    writer, run, logger, free = Writer(), Run(), LightningLogger(), Run()
    sinks = [writer, run, logger, TensorBoard(writer, prefix="net/"), Logger(free, prefix="", step=False)]
    with report(loop.module, sinks, every=2):
        loop.train(4)
    now = scalars(bagua.stats(loop.module))
    assert run.rows == logger.rows
    assert [step for _, step in run.rows] == [2, 4] and [step for _, step in free.rows] == [0, 1]
    assert run.rows[-1][0].keys() == {f"bagua/{key}" for key in now}
    assert run.rows[-1][0]["bagua/steps"] == 4 == free.rows[-1][0]["steps"]
    assert {(tag, step) for tag, _, step in writer.points} == {
        (prefix + key, step) for prefix in ("bagua/", "net/") for key in now for step in (2, 4)
    }
    assert ("net/exchanges_per_step", 1.0, 4) in writer.points


def test_sinks_are_recognised(tmp_path: Path) -> None:
    class Both(LightningLogger):
        add_scalar = Writer.add_scalar

    found = as_sinks([Both(), LightningLogger(), Run(), tmp_path / "a.csv", str(tmp_path / "b.csv"), print])
    assert [type(each).__name__ for each in found] == [
        "TensorBoard",
        "Logger",
        "Logger",
        "CSVFile",
        "CSVFile",
        "Callback",
    ]
    assert as_sinks((found[0],)) == found[:1] == as_sinks(found[0])
    assert list(map(repr, found[1:3])) == ["Logger(LightningLogger)", "Logger(Run)"] and repr(found[5]) == "print"


@pytest.mark.parametrize(
    "value",
    [logging.getLogger("x"), torch.ones(1), Run, Writer, 3, None, object()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_sink_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"to\[0\]: .* is no sink"):
        as_sinks([value])
    for kind in (TensorBoard, Logger):
        with pytest.raises(TypeError, match=r"expected an object with"):
            kind(value)


def test_a_path_that_is_no_csv_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"to: expected a path that ends in .csv, got 'metrics.json'"):
        as_sinks("metrics.json")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_file_is_appended_to(loop: Loop, tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.csv"
    for _ in range(2):
        with report(loop.module, path, every=2):
            loop.train(2)
            assert rows(path)[-1]["steps"] == str(bagua.stats(loop.module).steps), "a row is on disk at once"
    found = rows(path)
    assert [row["steps"] for row in found] == ["2", "4"] and tuple(found[0]) == COLUMNS
    assert found[1]["exchanges_total"] == "4" and found[1]["exchanges_per_step"] == "1.0"
    assert found[0]["compression_cosine"] == "" == found[0]["extra"] and found[0]["rank"] == "0"
    assert found[0]["algorithm"] == bagua.stats(loop.module).algorithm


def test_a_csv_file_with_other_columns_is_left_alone(loop: Loop, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,2.5\n")
    with pytest.raises(ValueError, match=r"metrics.csv: exists and has other columns"):
        report(loop.module, path)
    assert path.read_text() == "step,loss\n1,2.5\n"


def write_a_file(team: Team, path: str) -> None:
    loop = Loop(team, "bytegrad")
    with report(loop.module, path, every=1, ranks="all"):
        loop.train(1)
    bagua.detach(loop.module)


def test_each_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    run_teams(2, write_a_file, str(tmp_path / "{rank}" / "metrics.csv"))
    for rank in range(2):
        (row,) = rows(tmp_path / str(rank) / "metrics.csv")
        assert row["rank"] == str(rank) and int(row["sent_bytes_total"]) > 0 and row["world_size"] == "2"
    with pytest.raises(ValueError, match=r"several ranks report; put \{rank\} into the path"):
        CSVFile(tmp_path / "metrics.csv").open(0, alone=False)


def measured(team: Team) -> tuple[bagua.Stats, bagua.Stats]:
    loop = Loop(team, "bytegrad", guard=bagua.Guard(every=1))
    loop.train(2)
    since = bagua.stats(loop.module)
    loop.train(3)
    now = bagua.stats(loop.module)
    bagua.detach(loop.module)
    return now, since


def test_scalars() -> None:
    now, since = run_teams(2, measured)[0]
    values, all_steps = scalars(now, since), scalars(now)
    assert all(isinstance(value, int | float) for value in values.values())
    total = now.total
    assert values["steps"] == 5 and values["world_size"] == 2 and values["bucket_bytes"] == 28 * 4
    assert values["sent_bytes_total"] == total.bytes_sent and values["dense_bytes_total"] == total.dense_bytes
    assert values["communication_seconds_total"] == total.comm_s
    assert values["exposed_communication_seconds_total"] == total.exposed_s > 0
    assert all_steps["sent_bytes_per_step"] == total.bytes_sent / 5
    assert values["sent_bytes_per_step"] == (total.bytes_sent - since.total.bytes_sent) / 3
    assert values["exposed_communication_seconds_per_step"] == pytest.approx(
        (total.exposed_s - since.total.exposed_s) / 3
    )
    assert values["compression_ratio"] == now.last.compression_ratio
    assert now.quality is not None and values["compression_cosine"] == now.quality.cosine > 0.9
    assert scalars(now, now)["sent_bytes_per_step"] == 0.0
    assert "autotune_samples" not in values


def test_what_an_algorithm_reports(loop: Loop, tmp_path: Path) -> None:
    now = dataclasses.replace(bagua.stats(loop.module), extra={"staleness": Series().plus(1.0).plus(3.0).plus(2.0)})
    values = scalars(now)
    assert (values["staleness_last"], values["staleness_mean"], values["staleness_max"]) == (2.0, 2.0, 3.0)
    sink = CSVFile(tmp_path / "metrics.csv")
    sink.open(0, alone=True)
    sink.write(now, now)
    sink.close()
    assert json.loads(rows(tmp_path / "metrics.csv")[0]["extra"]) == {"staleness": 2.0}


def test_the_page_lists_every_metric() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text().split("\n## Values\n", 1)[1].split("\n## ", 1)[0]
    listed = [
        key
        for line in page.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert listed == [key for metric in METRICS for key in metric.keys]


@pytest.mark.parametrize("kind", [OpenTelemetry, Prometheus])
def test_a_missing_package_is_named(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("bagua.metrics.sink.import_module", missing)
    with pytest.raises(
        ImportError, match=rf"bagua.metrics.{kind.__name__} needs \w+: pip install 'bagua\[(otel|prometheus)\]'"
    ):
        kind()


class Meter:
    """As a `MeterProvider`, its meter and all instruments of it; keeps the attributes of points."""

    def __init__(self) -> None:
        self.attributes: list[Mapping[str, Any]] = []

    def get_meter(self, name: str, version: str) -> Meter:
        return self

    def create_counter(self, name: str, **about: str) -> Meter:
        return self

    create_gauge = create_counter

    def set(self, value: float, attributes: Mapping[str, Any]) -> None:
        self.attributes.append(attributes)

    add = set


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [("ByteGrad(codec=Eden(bits=2))", "ByteGrad"), ("Auto(allow='lossy'): ByteGrad(codec='int4')", "Auto: ByteGrad")],
)
def test_points_of_opentelemetry_have_the_algorithms_name(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, name: str
) -> None:
    monkeypatch.setattr("bagua.metrics.sink.import_module", lambda _: None)
    meter, cost = Meter(), bagua.StepStats()
    stats = bagua.Stats(algorithm, 1, 1, (4,), 0, cost, cost)
    OpenTelemetry(meter).write(stats, stats)
    assert meter.attributes
    assert all(each["bagua.algorithm"] == name for each in meter.attributes)
