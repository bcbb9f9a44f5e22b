"""Several hosts at a site: `python -m benchmarks.levels [--json FILE] [--quick]`.

Hosts at two sites, which share one slow link. DDP, a sum in full precision, 8 bits and 1 bit train an emulated model:
without sites, so that a node is a host; with BAGUA_SITE, so that each site sums for itself and only the sites
exchange compressed gradients; and with what a trial at the start chooses of these two, the default where there are
sites. All take turns in the same processes, so that other load on the machine affects all
alike. The first step of a turn does not count: connections that were idle start slowly. Needs root or user namespaces.

Bound of all with sites: max(C, F + W / B), with C a step without communication, F its forward pass, W = b N bits the
least that two sites have to tell each other in each direction, and B the rate of the link between them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import bagua
from bagua.bench import baselines, models, progress, results_file
from bagua.bench.compute import Compute, EmulatedModel
from bagua.bench.layout import Columns
from bagua.bench.machine import describe_machine, now
from bagua.bench.training import Training
from bagua.lab import Cluster, Link
from bagua.lab.pairs import Ends
from benchmarks.sites import detach, in_turns, run_ranks


class System(NamedTuple):
    """A row: an algorithm with its options, in sites or not, and the bits of an element that it sends."""

    algorithm: str
    options: dict[str, Any]
    sites: bool
    bits: float


SYSTEMS = {
    "DDP": System("", {}, False, 32),
    "full precision": System("gradient_allreduce", {}, False, 32),
    "full precision, sites": System("gradient_allreduce", {"hierarchical": True}, True, 32),
    "8 bits": System("bytegrad", {}, False, 8),
    "8 bits, sites": System("bytegrad", {"hierarchical": True}, True, 8),
    "8 bits, by trial": System("bytegrad", {}, True, 8),
    "1 bit": System("bytegrad", {"codec": "eden"}, False, 1),
    "1 bit, sites": System("bytegrad", {"codec": "eden", "hierarchical": True}, True, 1),
    "1 bit, by trial": System("bytegrad", {"codec": "eden"}, True, 1),
}
SITES = ("left", "right")
_FORWARD = 1 / 3
_WARMUP = 2


def bound_s(system: System, num_elements: int, compute_s: float, bits_per_s: float) -> float:
    """Seconds of a step that no schedule over the sites' link can undercut."""
    return max(compute_s, _FORWARD * compute_s + system.bits * num_elements / bits_per_s)


def work(folder: Path, model_name: str, compute_s: float, rounds: int, hosts: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    bagua.init_process_group("gloo")
    rank = dist.get_rank()
    site = SITES[2 * int(os.environ["GROUP_RANK"]) // hosts]
    trainings, trials = dict[str, Training](), dict[str, list[str]]()
    for name, system in SYSTEMS.items():
        if rank == 0:
            progress.show(f"{name}: connecting")
        model = EmulatedModel(models.get(model_name), Compute(compute_s, _FORWARD), seed=rank)
        if not system.algorithm:
            trainings[name] = baselines.ddp(model)
        else:
            os.environ["BAGUA_SITE"] = site if system.sites else ""
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            bagua.distribute(model, optimizer, system.algorithm, **system.options)
            trainings[name] = Training.of(model, optimizer, lambda model=model: detach(model))
        for _ in range(_WARMUP):
            trainings[name].step()
        if system.algorithm:
            trials[name] = [each for each in bagua.stats(model).notices if each.startswith("sites: ")]
    times = in_turns(trainings, rounds, "two sites")
    if rank == 0:
        (folder / "result.json").write_text(json.dumps({"times_s": times, "trials": trials}))
    dist.barrier()
    dist.destroy_process_group()


def rows_of(times: dict[str, list[list[float]]], num_elements: int, compute_s: float, bits_per_s: float) -> list[Any]:
    """Medians of the steps and of the ratios to DDP and to the same without sites in each turn, and the bound."""
    rows = []
    for name, system in SYSTEMS.items():
        if name not in times:  # of earlier results
            continue
        ms = 1000 * statistics.median(s for turn in times[name] for s in turn)
        bound_ms = 1000 * bound_s(system, num_elements, compute_s, bits_per_s)
        flat = name.partition(",")[0]
        rows.append(
            {
                "system": name,
                "ms": ms,
                "x_ddp": _paired(times["DDP"], times[name]),
                "x_without_sites": _paired(times[flat], times[name]),
                "bound_ms": bound_ms,
                "efficiency": bound_ms / ms,
            }
        )
    return rows


def _paired(others: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> float:
    return statistics.median(
        statistics.median(other) / statistics.median(mine) for other, mine in zip(others, own, strict=True)
    )


def a_link(text: str) -> str:
    """Check RATE/LATENCY of the command line."""
    rate, _, latency = text.partition("/")
    try:
        Link(rate, latency or "0ms")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    return f"{rate}/{latency or '0ms'}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.levels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="a model of 2.5 M elements, 2 turns")
    parser.add_argument("--model", metavar="NAME", help="of `bagua bench` (layers25m/10)")
    parser.add_argument("--hosts", type=int, default=6, metavar="N", help="half of them at each site (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of a host (%(default)s)")
    link: dict[str, Any] = {"type": a_link, "metavar": "RATE/LATENCY"}
    parser.add_argument("--host-link", default="1gbit/1ms", help="(%(default)s)", **link)
    parser.add_argument("--link", default="100mbit/20ms", help="of the sites (%(default)s)", **link)
    parser.add_argument("--compute-ms", type=float, default=100, metavar="MS", help="of a step (%(default)s)")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each (5)")
    parser.add_argument("--limit", type=float, default=900, metavar="S", help="seconds for all (%(default)s)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.hosts < 2 or options.hosts % 2:
        parser.error(f"--hosts must be even, not {options.hosts}")
    name, compute_s = options.model or "layers25m/10", options.compute_ms / 1000
    rounds = options.rounds or (2 if options.quick else 5)
    if options.worker:
        work(options.worker, name, compute_s, rounds, options.hosts)
        return
    near, far = (Link(*text.split("/")) for text in (options.host_link, options.link))
    half = options.hosts // 2
    pairs: dict[Ends, Link] = {(tuple(range(half)), tuple(range(half, options.hosts))): far}
    words = ["--model", name, "--compute-ms", f"{options.compute_ms:g}", "--rounds", str(rounds)]
    with (
        tempfile.TemporaryDirectory(prefix="bagua-levels-") as folder,
        Cluster(options.hosts, near, pairs=pairs, mode="namespaces") as cluster,
    ):
        words = ["benchmarks.levels", "--worker", folder, *words, "--hosts", str(options.hosts)]
        run_ranks(cluster, words, options.ranks, options.limit)
        found, report = json.loads((Path(folder) / "result.json").read_text()), cluster.report()
    progress.clear()
    num_elements = models.get(name).num_elements
    rows = rows_of(found["times_s"], num_elements, compute_s, far.settings()[0])
    print(
        f"2 sites of {half} hosts with {options.ranks} ranks each, {options.host_link}; between the sites "
        f"{options.link}; {num_elements / 1e6:.1f} M fp32 elements, {options.compute_ms:g} ms of compute"
    )
    columns = Columns(
        ("system", -24), ("ms", 8), ("x DDP", 8), ("x without sites", 17), ("bound, ms", 11), ("efficiency", 12)
    )
    print(
        columns.table(
            [
                [row["system"], f"{row['ms']:.0f}", f"{row['x_ddp']:.2f}", f"{row['x_without_sites']:.2f}",
                 f"{row['bound_ms']:.0f}", f"{row['efficiency']:.2f}"]
                for row in rows
            ]
        )
    )  # fmt: skip
    for system, notices in found["trials"].items():
        print("".join(f"{system}: {each}\n" for each in notices), end="")
    if options.json:
        settings = {"hosts": options.hosts, "ranks": options.ranks, "host_link": options.host_link,
                    "link": options.link, "model": name, "num_elements": num_elements,
                    "compute_ms": options.compute_ms, "rounds": rounds}  # fmt: skip
        results_file.write(
            options.json,
            {"date": now(), "bagua": bagua.__version__, "machine": describe_machine(), "settings": settings,
             "rows": rows, "trials": found["trials"], "times_s": found["times_s"], "report": report.as_dict()},
        )  # fmt: skip


if __name__ == "__main__":
    main()
