"""The native transport beside gloo and DDP: `python -m benchmarks.native_lane [--json FILE] [--conditions LIST]`.

Each rank holds copies of a model, whose gradients appear after a set time: one that exchanges over gloo, one over the
native transport, one that exchanges nothing, and with `--transports gloo,native,ddp` one in DistributedDataParallel.
They take turns in the same processes. Of each turn count the time of a step and the CPU seconds of all threads of all
ranks; those of the copy that exchanges nothing are taken off. Bytes are those that the ranks sent, for DDP those of its
all-reduce. CPU seconds that Linux spends on behalf of no process do not count.

Ranks are processes of this machine on loopback, or with --conditions one on each emulated host (root or user
namespaces). Results are written after each system. With --resume, what the file has is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.bench import bounds, conditions, models, progress, results_file
from bagua.bench.bounds import Timing, Traffic, all_to_all_mean, bound_s, payload_bits_per_s
from bagua.bench.compute import Compute, EmulatedModel
from bagua.bench.conditions import Condition
from bagua.bench.hosts import Hosts, LabHosts, LocalHosts, rank_environment
from bagua.bench.layers import Layer, Model
from bagua.bench.layout import Columns
from bagua.bench.machine import describe_machine, now
from bagua.bench.training import Training, make_optimizer
from bagua.bench.turns import turns
from bagua.bench.worker import await_file, connect, run_rank
from bagua.comm.mesh_connect import CONGESTION
from bagua.lab.errors import LabError


class System(NamedTuple):
    """An algorithm, its options, and what a host sends in a step, of the model and the number of ranks."""

    algorithm: str
    options: dict[str, Any]
    traffic: Callable[[Model, int], Traffic]


def _mean(bits: float) -> Callable[[Model, int], Traffic]:
    return lambda model, ranks: all_to_all_mean(model.num_elements, ranks, bits)


_POWER_RANK = 4
SYSTEMS = {
    "bytegrad": System("bytegrad", {}, _mean(8 + 8 * 8 / 1024)),
    "int4": System("gradient_allreduce", {"codec": "int4"}, _mean(4 + 32 / 128)),
    "sign": System("gradient_allreduce", {"codec": "sign"}, _mean(1 + 32 / 2048)),
    "allreduce": System("gradient_allreduce", {}, _mean(32)),
    "bf16": System("gradient_allreduce", {"codec": "bf16"}, _mean(16)),
    "gossip": System(
        "decentralized",
        {"peer_selection_mode": "shift_one", "hierarchical": False},
        lambda model, ranks: bounds.gossip(model.num_elements, ranks),
    ),
    "differences": System(
        "low_precision_decentralized",
        {"hierarchical": False},
        lambda model, ranks: bounds.difference_gossip(model.num_elements, ranks),
    ),
    "power_sgd": System(
        "power_sgd", {"rank": _POWER_RANK}, lambda model, ranks: bounds.low_rank(model.shapes, ranks, _POWER_RANK)
    ),
}
DDP = "ddp"
TRANSPORTS = ("gloo", "native", "native_bbr", "native_cubic", DDP)
EQUAL = "equal"
LOOPBACK = "loopback"
_LAYERS = 16
_LIMIT_S = 900.0
_WAIT_S = 120.0  # of a rank for another one, or for the links to be changed
_POLL_S = 0.02


def model_of(name: str, elements: int) -> Model:
    """16 equal layers of `elements` in all, or the model that `bagua bench` knows by that name."""
    if name != EQUAL:
        return models.get(name)
    side = max(1, round((elements / _LAYERS) ** 0.5))
    return Model(EQUAL, tuple(Layer(f"layer{i}", ((side, side),), 1.0) for i in range(_LAYERS)))


class Contender:
    """One copy of the model.

    Attributes:
        sent: bytes that this rank has sent.
    """

    def __init__(self, transport: str | None, system: str, args: argparse.Namespace) -> None:
        model = model_of(args.model, args.elements)
        self.model = EmulatedModel(model, Compute(args.compute_ms / 1000), dist.get_rank())
        optimizer, trained = make_optimizer("sgd", self.model), self.model
        self._distributed, self._sent, self._steps_sent = transport not in (None, DDP), 0.0, 0
        if transport == DDP:
            trained = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            self._sent = all_to_all_mean(model.num_elements, dist.get_world_size(), 32).bytes_per_host
        elif transport is not None:
            way, _, congestion = transport.partition("_")
            os.environ[CONGESTION] = congestion
            chosen = SYSTEMS[system]
            bagua.distribute(self.model, optimizer, chosen.algorithm, transport=way, **chosen.options)
        self._training = Training.of(trained, optimizer)
        self._steps = args.steps

    def measure(self) -> dict[str, float]:
        """Seconds, CPU seconds and bytes sent of a step on this rank."""
        dist.barrier()
        sent, cpu, started = self.sent, time.process_time(), time.perf_counter()
        for _ in range(self._steps):
            self._training.step()
            self._steps_sent += 1
        found = time.perf_counter() - started, time.process_time() - cpu, self.sent - sent
        dist.barrier()
        return {name: value / self._steps for name, value in zip(("step_s", "cpu_s", "sent_bytes"), found, strict=True)}

    @property
    def sent(self) -> float:
        return bagua.stats(self.model).total.bytes_sent if self._distributed else self._sent * self._steps_sent

    def close(self) -> None:
        if self._distributed:
            bagua.detach(self.model)


def work(folder: Path, rank: int, size: int) -> None:
    """One rank: writes what it measured."""
    args = argparse.Namespace(**json.loads((folder / "job.json").read_text()))
    os.environ["GROUP_RANK"] = str(rank)  # each rank is a host
    if os.environ["BAGUA_BENCH_INTERFACE"]:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["BAGUA_BENCH_INTERFACE"]
    connect(folder, rank, size, _WAIT_S)
    copies = {str(name): Contender(name, args.system, args) for name in (None, *args.transports)}
    dist.barrier()
    if rank == 0:
        results_file.write(folder / "ready.json", True, indent=None)
    await_file(folder / "go.json", _WAIT_S)
    calls = {name: copy.measure for name, copy in copies.items()}
    found = turns(calls, args.rounds, 1, _teller(args) if rank == 0 else _nothing)
    results_file.write(folder / f"found-{rank}.json", found, indent=None)
    dist.barrier()
    for copy in copies.values():
        copy.close()
    dist.destroy_process_group()


def _nothing(done: int, total: int) -> None: ...


def _teller(args: argparse.Namespace) -> Any:
    return lambda done, total: progress.show(f"{args.condition}, {args.system}: {done} of {total}")


def run_ranks(ranks: int, condition: Condition | None, job: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Run `work` on all ranks; returns what each measured, and how the hosts' TCP adapts its rate ("" on loopback).

    Links have their limits once all copies are made.

    Raises:
        RuntimeError: a rank failed, or the limit of time was reached.
    """
    hosts: Hosts = LocalHosts(ranks) if condition is None else LabHosts(ranks, condition)
    try:
        with tempfile.TemporaryDirectory(prefix="bagua-native-") as name, tempfile.TemporaryFile("w+") as log:
            folder = Path(name)
            results_file.write(folder / "job.json", job, indent=None)
            hosts.set_phase("setup")
            command = [sys.executable, "-m", "benchmarks.native_lane", "--worker", str(folder)]
            jobs = hosts.start(command, rank_environment(hosts, ranks), log)
            deadline, limited = time.monotonic() + _LIMIT_S, False
            while any(job.poll() is None for job in jobs):
                if time.monotonic() > deadline or any(job.poll() for job in jobs):
                    break
                if not limited and (folder / "ready.json").exists():
                    limited = True
                    hosts.set_phase("measure")
                    results_file.write(folder / "go.json", True, indent=None)
                time.sleep(_POLL_S)
            if any(job.poll() != 0 for job in jobs):
                hosts.kill()
                log.seek(0)
                raise RuntimeError(f"a rank failed, or took more than {_LIMIT_S:g} s:\n{log.read()[-3000:]}")
            found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]
            return found, hosts.congestion
    finally:
        hosts.close()


def summarise(
    system: str, found: Sequence[dict[str, Any]], condition: Condition | None, model: Model, compute_ms: float
) -> dict[str, Any]:
    """Medians over rounds: milliseconds of a step, CPU seconds per GB, shares of the bound; ratios are to gloo.

    `faster_than_ddp` is the step of DDP in the same round, over this one's.

    Args:
        system: one of `SYSTEMS`.
        found: of each rank, what each round of each copy measured.
        condition: None: no links were emulated, and there is no bound.
        model: that was trained.
        compute_ms: of a step.
    """
    ranks, names = len(found), [name for name in found[0] if name != "None"]
    rounds = range(len(found[0]["None"]))

    def total(copy: str, what: str) -> list[float]:
        return [sum(rank[copy][number][what] for rank in found) for number in rounds]

    def slowest(copy: str) -> list[float]:
        return [max(rank[copy][number]["step_s"] for rank in found) for number in rounds]

    alone, row = total("None", "cpu_s"), {"system": system, "ranks": ranks}
    alone_s = statistics.median(slowest("None"))
    for name in names:
        sent = statistics.median(total(name, "sent_bytes"))
        extra = [mine - none for mine, none in zip(total(name, "cpu_s"), alone, strict=True)]
        row[f"{name}_step_ms"] = 1000 * statistics.median(slowest(name))
        row[f"{name}_rounds_ms"] = [1000 * each for each in slowest(name)]
        row[f"{name}_cpu_s_per_gb"] = statistics.median(extra) / sent * 1e9
        row[f"{name}_sent_mb"] = sent / 1e6
    for name in names if "gloo" in names else ():
        pairs = zip(slowest("gloo"), slowest(name), strict=True)
        row[f"{name}_step_ratio"] = statistics.median(mine / gloo for gloo, mine in pairs)
        row[f"{name}_cpu_ratio"] = row[f"{name}_cpu_s_per_gb"] / row["gloo_cpu_s_per_gb"]
    for name in names if DDP in names else ():
        pairs = zip(slowest(DDP), slowest(name), strict=True)
        row[f"{name}_faster_than_ddp"] = statistics.median(ddp / mine for ddp, mine in pairs)
    if condition is not None:
        traffic = SYSTEMS[system].traffic(model, ranks)
        # The optimizer's share of a step without compute is all of what is left of it.
        compute_s = compute_ms / 1000
        timing = Timing(alone_s, compute_s / 3, max(alone_s - compute_s, 0.0))
        rate, latency_s = payload_bits_per_s(condition.host_bits_per_s(ranks)), condition.least_latency_s(ranks)
        row["bound_ms"] = 1000 * bound_s(traffic, timing, rate, latency_s, model.layers)
        row |= {f"{name}_share": row["bound_ms"] / row[f"{name}_step_ms"] for name in names if name != DDP}
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For a terminal."""
    columns = Columns(
        ("condition", -18), ("system", -10), ("ranks", 6), (" transport", -15), ("ms", 9), ("x gloo", 8),
        ("CPU s/GB", 10), ("x gloo", 8), ("DDP / it", 9), ("share", 7),
    )  # fmt: skip
    return columns.table(
        [
            [
                row["condition"], row["system"], str(row["ranks"]), f" {name}", f"{row[f'{name}_step_ms']:.1f}",
                _number(row, f"{name}_step_ratio"), f"{row[f'{name}_cpu_s_per_gb']:.2f}",
                _number(row, f"{name}_cpu_ratio"), _number(row, f"{name}_faster_than_ddp"),
                _number(row, f"{name}_share"),
            ]
            for row in rows
            for name in TRANSPORTS if f"{name}_step_ms" in row
        ]
    )  # fmt: skip


def _number(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.2f}" if key in row else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON.

    Returns:
        0, or 1 where this machine allows no emulated hosts.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.native_lane",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--resume", action="store_true", help="measure only what the file of --json has not got")
    parser.add_argument(
        "--conditions",
        metavar="LIST",
        help="of emulated hosts, as in bagua bench: 1gbit/0ms,100mbit/20ms; default: loopback",
    )
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("--model", default=EQUAL, help="16 equal layers, or a model of bagua bench (%(default)s)")
    parser.add_argument("--elements", type=int, default=8_000_000, help="of the equal layers (%(default)s)")
    parser.add_argument("--compute-ms", type=float, default=0.0, help="of a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns that count (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="2 ranks, a small model, few turns: to see that it runs")
    parser.add_argument(
        "--only",
        default="bytegrad,int4,sign",
        help=f"systems: {', '.join(SYSTEMS)} (%(default)s)",
    )
    parser.add_argument(
        "--transports",
        default="gloo,native",
        help=f"of {', '.join(TRANSPORTS)}; an ending chooses the congestion control, {DDP} is torch's, which sums in "
        "full precision whatever the system (%(default)s)",
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        run_rank(args.worker, work)
    for option, known in (("only", SYSTEMS), ("transports", TRANSPORTS)):
        setattr(args, option, getattr(args, option).split(","))
        unknown = sorted(set(getattr(args, option)) - set(known))
        if unknown:
            parser.error(f"--{option}: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    if args.quick:
        args.ranks, args.elements, args.steps, args.rounds = "2", 200_000, 1, 2
    try:
        links = [conditions.parse(word) for word in (args.conditions or "").split(",") if word]
        model = model_of(args.model, args.elements)
    except ValueError as error:
        parser.error(str(error))
    try:
        rows = measure(args, model, links or [None])
    except LabError as error:
        print(f"benchmarks.native_lane: {error}", file=sys.stderr)
        return 1
    progress.clear()
    print(table(rows))
    return 0


def measure(args: argparse.Namespace, model: Model, links: Sequence[Condition | None]) -> list[dict[str, Any]]:
    """Measure all systems on all links, and write the rows after each.

    Raises:
        LabError: this machine allows no emulated hosts.
    """
    settings = {name: getattr(args, name) for name in ("model", "elements", "compute_ms", "steps", "rounds")}
    facts = {"date": now(), "machine": describe_machine(), **settings}
    rows: list[dict[str, Any]] = []
    if args.resume and args.json.exists():
        earlier = json.loads(args.json.read_text())
        if {name: earlier[name] for name in settings} != settings:
            raise SystemExit(f"{args.json}: measured with other settings; there is nothing to resume")
        rows, facts = earlier["rows"], {name: value for name, value in earlier.items() if name != "rows"}
    for condition in links:
        name = condition.name if condition is not None else LOOPBACK
        for ranks in map(int, args.ranks.split(",")):
            for system in args.only:
                if any((row["condition"], row["ranks"], row["system"]) == (name, ranks, system) for row in rows):
                    continue
                job = {**settings, "condition": name, "system": system, "transports": args.transports}
                load = os.getloadavg()[0]
                found, congestion = run_ranks(ranks, condition, job)
                row = summarise(system, found, condition, model, args.compute_ms)
                rows.append({"condition": name, "congestion": congestion, "load_1min": load, **row})
                if args.json:
                    results_file.write(args.json, {**facts, "rows": rows})
    return rows


if __name__ == "__main__":
    sys.exit(main())
