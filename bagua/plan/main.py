"""`bagua plan`: step time, scaling efficiency, bytes and cost of each algorithm on a cluster that is not yet bought."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bagua.bench.contenders import split_names
from bagua.bench.layout import Columns
from bagua.lab.link import bits_per_second, seconds
from bagua.plan.cluster import CPU, GPU, Cluster
from bagua.plan.phases import UnknownCourseError
from bagua.plan.prediction import Prediction, predict
from bagua.plan.prices import Prices, parse_prices
from bagua.plan.recipe import DEFAULT_NAMES
from bagua.plan.workload import Workload, is_count, load_model, work_of

__all__ = ["main"]

_COSTS = {"cpu": CPU, "gpu": GPU}
_TFLOPS = {"cpu": 0.1, "gpu": 20.0}
_SAMPLES, _TOKENS = 32, 4096
_BANDWIDTHS = (1e7, 3e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 1e10, 2.5e10, 1e11)  # bits per second, in the figure
_MAX_RANKS = 16384


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table, and write what else was asked for.

    Returns:
        0; 2 for a wrong argument, which is named in one line.
    """
    args = _parser().parse_args(argv)
    try:
        report = _report(args)
        if args.plot is not None:
            _plot(args, report)
        if args.json is not None:
            _write(args.json, report)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"bagua plan: {error}", file=sys.stderr)
        return 2
    print(_table(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagua plan", description="Predict a training step on a cluster, by simulating buckets, lanes and links."
    )
    add = parser.add_argument
    add("--model", required=True, help="vgg16, resnet50, bert_large, a number of parameters (1.3b), FILE.py:FUNCTION")
    add("--hosts", type=int, required=True, help="number of hosts")
    add("--devices", type=int, default=1, help="devices of a host, a rank each (default 1)")
    add("--bandwidth", required=True, help="of a host's link, each way, as 10gbit")
    add("--latency", default="0.05ms", help="from host to host, one way (default 0.05ms)")
    add("--inner-bandwidth", default="1000gbit", help="of a device to others of its host (default 1000gbit)")
    add("--inner-latency", default="10us", help="between devices of a host (default 10us)")
    add("--kind", choices=sorted(_COSTS), default="gpu", help="of the devices (default gpu)")
    add("--cores", type=float, default=4.0, help="CPU cores a rank has for exchanges, with --kind cpu (default 4)")
    add("--slowest", type=float, default=1.0, help="speed of the slowest host, up to 1 (default 1)")
    add("--compute-ms", type=float, help="forward and backward pass; without it, estimated from --batch and --tflops")
    add("--optimizer-ms", type=float, default=0.0, help="optimizer step (default 0)")
    add("--batch", type=int, help=f"samples of a device, or tokens for a number of parameters ({_SAMPLES}, {_TOKENS})")
    add("--tflops", type=float, help="that a device sustains, in 1e12 operations a second (gpu 20, cpu 0.1)")
    add(
        "--algorithms", help="names as in `bagua bench`, separated by commas, with options by semicolons (default: all)"
    )
    add("--host-price", help="of a host, with its unit, as 2.50usd/h")
    add("--traffic-price", help="of bytes that leave a host, with its unit, as 0.02usd/GB")
    add("--json", metavar="FILE", help="write the report there")
    add("--plot", metavar="FOLDER", help="draw step time over bandwidth and efficiency over hosts there")
    return parser


def _report(args: argparse.Namespace) -> dict[str, Any]:
    model = load_model(args.model)
    costs = _COSTS[args.kind]
    cluster = _cluster(args)
    if cluster.ranks > _MAX_RANKS:
        raise ValueError(f"--hosts {args.hosts} x --devices {args.devices}: at most {_MAX_RANKS} ranks can be planned")
    workload, how = _workload(args, model)
    prices = parse_prices(args.host_price, args.traffic_price)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for name in DEFAULT_NAMES if args.algorithms is None else split_names(args.algorithms):
        try:
            rows.append(_row(predict(name, workload, cluster, costs), cluster, prices))
        except UnknownCourseError as error:
            if args.algorithms is not None:
                raise
            left_out[name] = str(error)
    baseline = next((row["step_ms"] for row in rows if row["algorithm"] == "ddp"), None)
    for row in rows:
        row["speedup_to_ddp"] = None if baseline is None else baseline / row["step_ms"]
    return {
        "kind": "plan",
        "model": {"name": model.name, "num_elements": model.num_elements, "num_layers": len(model.layers)},
        "cluster": {key: None if value == math.inf else value for key, value in asdict(cluster).items()},
        "device": args.kind,
        "compute": how,
        "compute_ms": 1e3 * workload.compute_s,
        "optimizer_ms": 1e3 * workload.optimizer_s,
        "currency": prices.currency,
        "rows": rows,
        "left_out": left_out,
    }


def _write(file: str, report: dict[str, Any]) -> None:
    try:
        Path(file).write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"--json: {file}: {error.strerror}") from error


def _cluster(args: argparse.Namespace) -> Cluster:
    return Cluster(
        args.hosts,
        args.devices,
        float(bits_per_second(args.bandwidth, "--bandwidth")),
        seconds(args.latency, "--latency"),
        float(bits_per_second(args.inner_bandwidth, "--inner-bandwidth")),
        seconds(args.inner_latency, "--inner-latency"),
        args.cores,
        args.slowest,
    )


def _workload(args: argparse.Namespace, model: Any) -> tuple[Workload, str]:
    """The workload, and where its compute time is from."""
    if args.compute_ms is not None:
        if not args.compute_ms >= 0:
            raise ValueError(f"--compute-ms: expected milliseconds >= 0, got {args.compute_ms}")
        return Workload.of(model, args.compute_ms / 1e3, args.optimizer_ms / 1e3), "given"
    counted = is_count(args.model)
    batch = args.batch if args.batch is not None else _TOKENS if counted else _SAMPLES
    tflops = args.tflops if args.tflops is not None else _TFLOPS[args.kind]
    if batch < 1:
        raise ValueError(f"--batch: expected a positive number, got {batch}")
    if not tflops > 0:
        raise ValueError(f"--tflops: expected a number > 0, got {tflops}")
    compute = work_of(model) * batch / (tflops * 1e12)
    what = "tokens" if counted else "samples"
    return Workload.of(model, compute, args.optimizer_ms / 1e3), f"estimated: {batch} {what} at {tflops:g} TFLOP/s"


def _row(found: Prediction, cluster: Cluster, prices: Prices) -> dict[str, Any]:
    return {
        "algorithm": found.algorithm,
        "step_ms": 1e3 * found.step_s,
        "exposed_ms": 1e3 * found.exposed_s,
        "bytes_per_host": found.bytes_per_host,
        "efficiency": found.efficiency,
        "cost_per_1000_steps": prices.of_steps(1000, found.step_s, found.bytes_per_host, cluster.hosts),
    }


def _table(report: dict[str, Any]) -> str:
    cluster, model = report["cluster"], report["model"]
    priced = report["currency"] is not None
    columns = [("algorithm", -38), ("step ms", 10), ("exposed ms", 12), ("MB/host", 10), ("scaling", 9), ("x DDP", 8)]
    if priced:
        columns.append((f"{report['currency']}/1000 steps", 18))
    rows = []
    for row in sorted(report["rows"], key=lambda row: row["step_ms"]):
        speedup = row["speedup_to_ddp"]
        cells = [
            row["algorithm"],
            f"{row['step_ms']:.1f}",
            f"{row['exposed_ms']:.1f}",
            f"{row['bytes_per_host'] / 1e6:.1f}",
            f"{100 * row['efficiency']:.0f} %",
            "" if speedup is None else f"{speedup:.2f}",
        ]
        rows.append([*cells, f"{row['cost_per_1000_steps']:.2f}"] if priced else cells)
    head = (
        f"{model['name']}: {model['num_elements'] / 1e6:.1f} M parameters; {cluster['hosts']} hosts x "
        f"{cluster['devices']} {report['device'].upper()} devices; {cluster['bandwidth'] / 1e9:g} Gbit/s, "
        f"{1e3 * cluster['latency']:g} ms\ncompute {report['compute_ms']:.1f} ms a step ({report['compute']}), "
        f"optimizer {report['optimizer_ms']:.1f} ms; predicted, not measured\n"
    )
    notes = "".join(f"\nleft out: {why}" for why in report["left_out"].values())
    return f"{head}\n{Columns(*columns).table(rows)}{notes}"


def _plot(args: argparse.Namespace, report: dict[str, Any]) -> None:
    from bagua.plan.figures import draw_lines, drawn

    model = load_model(args.model)
    workload = Workload.of(model, report["compute_ms"] / 1e3, report["optimizer_ms"] / 1e3)
    cluster, costs = _cluster(args), _COSTS[args.kind]
    names = drawn([row["algorithm"] for row in sorted(report["rows"], key=lambda row: row["step_ms"])])
    over_bandwidth = {
        name: [
            (rate / 1e9, 1e3 * predict(name, workload, replace(cluster, bandwidth=rate), costs).step_s)
            for rate in _BANDWIDTHS
        ]
        for name in names
    }
    most = max(cluster.hosts, _MAX_RANKS // cluster.devices)
    scales = [hosts for hosts in (4**power for power in range(8)) if hosts <= most]
    over_hosts = {
        name: [
            (hosts * cluster.devices, predict(name, workload, replace(cluster, hosts=hosts), costs).efficiency)
            for hosts in scales
        ]
        for name in names
    }
    folder = Path(args.plot)
    left_out = len(report["rows"]) - len(names)
    draw_lines(
        over_bandwidth, "Gbit/s of a host's link", "ms a step", folder / "bandwidth.svg", log=True, left_out=left_out
    )
    draw_lines(over_hosts, "devices", "scaling efficiency", folder / "scale.svg", log=False, left_out=left_out)
