"""Metrics in the packages that receive them: read back from where they put them."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bagua
from bagua.metrics import OpenTelemetry, Prometheus, report, scalars
from bagua.metrics.catalogue import METRICS
from tests.docs.markdown import ROOT, blocks
from tests.metrics.training import Loop

pytestmark = [pytest.mark.process, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]
PAGE = ROOT / "docs" / "metrics.md"


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"needs {name.partition('.')[0]}; `make test-interop` runs it")


@pytest.fixture
def loop() -> Iterator[Loop]:
    bagua.init_process_group()
    yield Loop(None, "bytegrad")
    bagua.destroy_process_group()


def expected(loop: Loop) -> dict[str, float]:
    return {f"bagua/{key}": value for key, value in scalars(bagua.stats(loop.module)).items()}


@pytest.mark.parametrize("module", ["torch.utils.tensorboard", "tensorboardX"])
def test_tensorboard(loop: Loop, tmp_path: Path, module: str) -> None:
    reader = package("tensorboard.backend.event_processing.event_accumulator")
    writer = package(module).SummaryWriter(str(tmp_path))
    with report(loop.module, writer, every=2):
        loop.train(5)
    writer.close()
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(expected(loop))
    assert [(e.step, e.value) for e in events.Scalars("bagua/steps")] == [(2, 2.0), (4, 4.0), (5, 5.0)]
    assert [e.value for e in events.Scalars("bagua/payload_bytes_per_step")] == [28 * 4.0] * 3


def test_weights_and_biases(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = package("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="bagua", mode="offline", dir=str(tmp_path), settings={"console": "off"})
    with report(loop.module, [run, wandb], every=2):
        loop.train(4)
    run.log({"end": 1}, step=9)  # a step is complete when the next one begins
    summary = {key: value for key, value in dict(run.summary).items() if key.startswith("bagua/")}
    run.finish()
    assert summary == pytest.approx(expected(loop))


def test_mlflow(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = package("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        with report(loop.module, mlflow, every=2):
            loop.train(4)
    client = mlflow.MlflowClient()
    assert client.get_run(run.info.run_id).data.metrics == pytest.approx(expected(loop))
    history = client.get_metric_history(run.info.run_id, "bagua/steps")
    assert [(each.step, each.value) for each in history] == [(2, 2.0), (4, 4.0)]


def points(reader: Any) -> tuple[dict[str, Any], Any]:
    """Values by name of the instrument, with its unit; the scope."""
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    found = {}
    for metric in scope.metrics:
        (point,) = metric.data.data_points
        found[metric.name, metric.unit] = (point.value, dict(point.attributes), type(metric.data).__name__)
    return found, scope.scope


def test_open_telemetry(loop: Loop) -> None:
    sdk, export = package("opentelemetry.sdk.metrics"), package("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    loop.train(1)  # what was before the report is not in its counters
    with report(loop.module, provider, every=2):
        loop.train(4)
        first, scope = points(reader)
    loop.distribute("gradient_allreduce")
    with report(loop.module, OpenTelemetry(provider, {"model": "net"}), every=2):  # a second one on the same meter
        loop.train(2)
    provider.force_flush()
    assert scope.name == "bagua" and scope.version
    attributes = {"bagua.rank": 0, "bagua.algorithm": "ByteGrad"}
    assert first["bagua.steps", "{step}"] == (3, attributes, "Sum")
    assert first["bagua.payload", "By"] == (3 * 28 * 4, attributes, "Sum")
    assert first["bagua.world_size", "{rank}"] == (1, attributes, "Gauge")
    assert {unit for _, unit in first} >= {"By", "s", "1"}
    found = [
        (dict(point.attributes), point.value)
        for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        if metric.name == "bagua.steps"
        for point in metric.data.data_points
    ]
    assert (attributes, 4) in found
    assert ({"bagua.rank": 0, "bagua.algorithm": "GradientAllReduce", "model": "net"}, 2) in found
    provider.shutdown()


def families(text: str) -> dict[str, Any]:
    parser = package("prometheus_client.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def test_prometheus(loop: Loop) -> None:
    client = package("prometheus_client")
    sink, other = Prometheus(port=0, labels={"job": 'a "b"\n'}), Prometheus()
    assert sink.text() == ""
    mine = client.CollectorRegistry(auto_describe=True)
    mine.register(sink)
    mine.register(other)
    with report(loop.module, [sink, other], every=2):
        loop.train(5)
        url = f"http://127.0.0.1:{sink.port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as response:
            served = response.read().decode()
        assert served == sink.text() and response.headers["Content-Type"].startswith("text/plain")
        asked = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(asked, timeout=60) as response:
            assert b"# UNIT bagua_sent_bytes bytes" in response.read()
    found = families(sink.text())
    (sample,) = found["bagua_steps"].samples
    assert (sample.name, sample.value, sample.labels) == ("bagua_steps_total", 5, {"job": 'a "b"\n', "rank": "0"})
    assert found["bagua_payload_bytes"].type == "counter" and found["bagua_world_size"].type == "gauge"
    assert found["bagua_algorithm_info"].samples[0].labels["algorithm"] == bagua.stats(loop.module).algorithm
    assert {family.key for family in METRICS if family.read(bagua.stats(loop.module)) is not None} == {
        name.removeprefix("bagua_") for name in found if name != "bagua_algorithm_info"
    }
    assert client.generate_latest(mine).decode().count("bagua_steps_total{") == 2
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=60)
    with report(loop.module, sink, every=2):  # again, with the same sink
        assert urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=60).status == 200


def test_prometheus_refuses_a_port_in_use_and_bad_options(loop: Loop) -> None:
    package("prometheus_client")
    first = Prometheus(port=0)
    with report(loop.module, first):
        port = first.port
        with pytest.raises(OSError, match=rf"cannot serve on 127.0.0.1:{port} \(rank 0\): .* need a port each"):
            report(loop.module, Prometheus(port=port))
    for options, message in (
        ({"port": 70000}, "port: expected a port number or None, got 70000"),
        ({"labels": {"a-b": "c"}}, "labels: 'a-b' is not a label name"),
        ({"labels": {"rank": "c"}}, "labels: 'rank' is not a label name"),
    ):
        with pytest.raises(ValueError, match=message):
            Prometheus(**options)


def run(code: str, folder: Path) -> None:
    """In a process of its own, without a launcher: one rank."""
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in job}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, f"{code}\n{ran.stderr}"


def test_the_page_and_the_examples(tmp_path: Path) -> None:
    for name in ("tensorboard", "opentelemetry.sdk", "prometheus_client"):
        package(name)
    first = next(block.text for block in blocks(PAGE) if block.language == "python")
    others = [block.text.replace("port=9400", "port=0") for block in blocks(PAGE) if block.language == "py"]
    assert len(others) == 3
    run("\n".join([first, *others]), tmp_path)
    for name in ("OpenTelemetry", "Prometheus"):
        code = f"failed = run('bagua.metrics.{name}')\nassert not failed, failed"
        run(f"from tests.docs.run_examples import run\n{code}", tmp_path)
