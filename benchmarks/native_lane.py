"""The native transport beside gloo: `python -m benchmarks.native_lane [--json FILE] [--lab]`.

Each rank holds three copies of a model, whose gradients appear after a set time: one that exchanges over gloo, one over
the native transport, and one that exchanges nothing. They take turns in the same processes. Of each turn count the time
of a step and the CPU seconds of all threads of all ranks; those of the copy that exchanges nothing are taken off. Bytes
are those that the ranks sent. CPU seconds that Linux spends on behalf of no process do not count.

Ranks are processes of this machine on loopback, or with --lab one on each emulated host (root or user namespaces).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bagua
from bagua.bench import progress, results_file
from bagua.bench.bounds import Timing, all_to_all_mean, bound_s
from bagua.bench.compute import Compute, EmulatedModel
from bagua.bench.layers import Layer, Model
from bagua.bench.layout import Columns
from bagua.bench.machine import describe_machine, now
from bagua.bench.training import Training, make_optimizer
from bagua.bench.turns import turns
from bagua.lab import Cluster, Link
from bagua.lab.link import bits_per_second

SYSTEMS: dict[str, tuple[str, dict[str, Any], float]] = {  # algorithm, options, bits per element
    "bytegrad": ("bytegrad", {}, 8 + 8 * 8 / 1024),
    "int4": ("gradient_allreduce", {"codec": "int4"}, 4 + 32 / 128),
    "sign": ("gradient_allreduce", {"codec": "sign"}, 1 + 32 / 2048),
}
TRANSPORTS = ("gloo", "native")
_LAYERS = 16
_LIMIT_S = 900.0


def model_of(elements: int) -> Model:
    """16 equal layers."""
    side = max(1, round((elements / _LAYERS) ** 0.5))
    return Model("equal", tuple(Layer(f"layer{i}", ((side, side),), 1.0) for i in range(_LAYERS)))


class Contender:
    """One copy of the model.

    Attributes:
        sent: bytes that this rank has sent.
    """

    def __init__(self, transport: str | None, system: str, args: argparse.Namespace) -> None:
        self.model = EmulatedModel(model_of(args.elements), Compute(args.compute_ms / 1000), dist.get_rank())
        optimizer = make_optimizer("sgd", self.model)
        if transport is not None:
            algorithm, options, _ = SYSTEMS[system]
            bagua.distribute(self.model, optimizer, algorithm, transport=transport, **options)
        self._distributed = transport is not None
        self._training = Training.of(self.model, optimizer)
        self._steps = args.steps

    def measure(self) -> dict[str, float]:
        """Seconds, CPU seconds and bytes sent of a step on this rank."""
        dist.barrier()
        sent, cpu, started = self.sent, time.process_time(), time.perf_counter()
        for _ in range(self._steps):
            self._training.step()
        found = time.perf_counter() - started, time.process_time() - cpu, self.sent - sent
        dist.barrier()
        return {name: value / self._steps for name, value in zip(("step_s", "cpu_s", "sent_bytes"), found, strict=True)}

    @property
    def sent(self) -> int:
        return bagua.stats(self.model).total.bytes_sent if self._distributed else 0

    def close(self) -> None:
        if self._distributed:
            bagua.detach(self.model)


def work(args: argparse.Namespace) -> None:
    """One rank: writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for system in args.only:
        copies = {str(name): Contender(name, system, args) for name in (None, *TRANSPORTS)}
        calls = {name: copy.measure for name, copy in copies.items()}
        found[system] = turns(calls, args.rounds, 1, _teller(system))
        for copy in copies.values():
            copy.close()
    (args.worker / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _teller(system: str) -> Any:
    return lambda done, total: progress.show(f"{system}: {done} of {total}") if dist.get_rank() == 0 else None


def run_ranks(ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `work` on all ranks; returns what each measured.

    Raises:
        RuntimeError: a rank failed, or the limit of time was reached.
    """
    options = ["--elements", args.elements, "--steps", args.steps, "--rounds", args.rounds]
    options += ["--compute-ms", args.compute_ms, "--only", ",".join(args.only)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bagua-native-")))
        command = [sys.executable, "-m", "benchmarks.native_lane", "--worker", str(folder), *map(str, options)]
        common = {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(args.port), "OMP_NUM_THREADS": "1"}
        jobs = []
        if args.lab:
            link = Link(bandwidth=args.bandwidth)
            cluster = stack.enter_context(Cluster(ranks, link, mode="namespaces"))
            for rank, host in enumerate(cluster.hosts):
                own = {"MASTER_ADDR": cluster.hosts[0].address, "GLOO_SOCKET_IFNAME": host.interface}
                own |= {"RANK": str(rank), "GROUP_RANK": str(rank)}
                jobs.append(host.popen(command, env={**os.environ, **common, **own}))
        else:
            for rank in range(ranks):
                own = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank)}
                own["GROUP_RANK"] = str(rank)
                jobs.append(subprocess.Popen(command, env={**os.environ, **common, **own}))
        deadline = time.monotonic() + _LIMIT_S
        try:
            while any(job.poll() is None for job in jobs):
                if time.monotonic() > deadline or any(job.poll() for job in jobs):
                    raise RuntimeError(f"a rank failed, or took more than {_LIMIT_S:g} s")
                time.sleep(0.1)
        finally:
            for job in jobs:
                if job.poll() is None:
                    job.kill()
        if any(job.returncode for job in jobs):
            raise RuntimeError("a rank failed")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def summarise(system: str, ranks: int, found: Sequence[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds: milliseconds of a step, CPU seconds per GB, shares of the bound."""
    rounds = range(args.rounds)

    def total(copy: str, what: str) -> list[float]:
        return [sum(rank[system][copy][number][what] for rank in found) for number in rounds]

    def slowest(copy: str) -> list[float]:
        return [max(rank[system][copy][number]["step_s"] for rank in found) for number in rounds]

    alone, row = total("None", "cpu_s"), {"system": system, "ranks": ranks}
    alone_s = statistics.median(slowest("None"))
    for name in TRANSPORTS:
        sent = statistics.median(total(name, "sent_bytes"))
        extra = [mine - none for mine, none in zip(total(name, "cpu_s"), alone, strict=True)]
        row[f"{name}_step_ms"] = 1000 * statistics.median(slowest(name))
        row[f"{name}_cpu_s_per_gb"] = statistics.median(extra) / sent * 1e9
        row[f"{name}_sent_mb"] = sent / 1e6
    ratios = [b / a for a, b in zip(slowest("gloo"), slowest("native"), strict=True)]
    row["step_ratio"] = statistics.median(ratios)
    row["cpu_ratio"] = row["native_cpu_s_per_gb"] / row["gloo_cpu_s_per_gb"]
    if args.lab:
        elements = model_of(args.elements).num_elements
        traffic = all_to_all_mean(elements, ranks, SYSTEMS[system][2])
        # The optimizer's share of a step without compute is all of what is left of it.
        compute_s = args.compute_ms / 1000
        timing = Timing(alone_s, compute_s / 3, max(alone_s - compute_s, 0.0))
        row["bound_ms"] = 1000 * bound_s(traffic, timing, bits_per_second(args.bandwidth), 0.0)
        for name in TRANSPORTS:
            row[f"{name}_share"] = row["bound_ms"] / row[f"{name}_step_ms"]
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For a terminal."""
    columns = Columns(
        ("system", -10), ("ranks", 6), ("gloo ms", 9), ("native ms", 11), ("ratio", 7), ("gloo s/GB", 11),
        ("native s/GB", 13), ("ratio", 7), ("share gloo", 12), ("native", 8),
    )  # fmt: skip
    return columns.table(
        [
            [
                row["system"], str(row["ranks"]), f"{row['gloo_step_ms']:.1f}", f"{row['native_step_ms']:.1f}",
                f"{row['step_ratio']:.2f}", f"{row['gloo_cpu_s_per_gb']:.2f}", f"{row['native_cpu_s_per_gb']:.2f}",
                f"{row['cpu_ratio']:.2f}", *(f"{row[f'{name}_share']:.2f}" for name in TRANSPORTS if "bound_ms" in row),
            ]
            for row in rows
        ]
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.native_lane",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--lab", action="store_true", help="emulated hosts instead of loopback")
    parser.add_argument("--bandwidth", default="1gbit", help="of the emulated hosts (%(default)s)")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("--elements", type=int, default=8_000_000, help="of the model (%(default)s)")
    parser.add_argument("--compute-ms", type=float, default=0.0, help="of a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns that count (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="2 ranks, a small model, few turns: to see that it runs")
    parser.add_argument("--only", default=",".join(SYSTEMS), help="systems (%(default)s)")
    parser.add_argument("--port", type=int, default=29517, help="of the first rank's store (%(default)s)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.only = args.only.split(",")
    unknown = sorted(set(args.only) - set(SYSTEMS))
    if unknown:
        parser.error(f"--only: unknown {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    if args.worker:
        work(args)
        return
    if args.quick:
        args.ranks, args.elements, args.steps, args.rounds = "2", 200_000, 1, 2
    rows = []
    for ranks in map(int, args.ranks.split(",")):
        found = run_ranks(ranks, args)
        rows += [summarise(system, ranks, found, args) for system in args.only]
    progress.clear()
    print(table(rows))
    if args.json:
        wanted = ("lab", "bandwidth", "elements", "compute_ms", "steps", "rounds")
        facts = {"date": now(), "machine": describe_machine(), **{name: getattr(args, name) for name in wanted}}
        results_file.write(args.json, {**facts, "rows": rows})


if __name__ == "__main__":
    main()
