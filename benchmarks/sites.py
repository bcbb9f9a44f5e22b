"""Hosts at unequal sites: `python -m benchmarks.sites [--json FILE] [--quick] [--seed N]`.

Four hosts whose links have 50 Mbit/s to 1 Gbit/s (`PAIRS`, or drawn from a seed). Four systems train an emulated
model: a ring all-reduce of gradients, 8-bit gossip with both neighbours on a ring, and all-reduces of 8 and 2 bits, in
which all pairs send to each other. Each runs as the ranks are, whose ring has the two slowest links, and with
`rank_order="measured"`, which finds another order and routes around slow links, in the same processes and in turns, so
that other load on the machine affects both alike. The first step of a turn does not count: connections that were idle
start slowly. Needs root or user namespaces.

Bounds. C is a step without communication, F its forward pass, N the number of elements, R of hosts. Of the fastest
ring, whichever it is, with B the rate of its slowest link: sum max(C, F + 64 N (R-1)/R / B); gossip, whose two
neighbours have a link each, and which sends beside the next step, max(C, 8 N / B). Of all-reduces with b bits, whose
pairs send 2 b N / R bits each way: max(C, F + 2 b N / R / S), with S the share that the slowest pair has with the
routes of the configured rates.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bagua
from bagua.bench import models, progress, results_file
from bagua.bench.compute import Compute, EmulatedModel
from bagua.bench.layout import Columns
from bagua.bench.machine import describe_machine, now
from bagua.bench.training import Training
from bagua.engine.startup.routes import best_routes, slowest_share
from bagua.lab import Cluster, Link

HOSTS = 4
HOST_LINK = Link("1gbit", "2ms")
PAIRS = {
    (0, 1): Link("50mbit", "20ms"),
    (0, 2): Link("600mbit", "4ms"),
    (0, 3): Link("1gbit", "2ms"),
    (1, 2): Link("400mbit", "5ms"),
    (1, 3): Link("800mbit", "3ms"),
    (2, 3): Link("100mbit", "15ms"),
}
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ring all-reduce": ("gradient_allreduce", {}),
    "ring gossip, 8 bits": ("low_precision_decentralized", {}),
    "all-reduce, 8 bits": ("bytegrad", {}),
    "all-reduce, 2 bits": ("gradient_allreduce", {"codec": "eden:bits=2"}),
}
BITS = {"all-reduce, 8 bits": 8, "all-reduce, 2 bits": 2}
ORDERS = {"ranks": None, "measured": "measured"}
_FORWARD = 1 / 3
_TURN = 3  # steps, of which the first does not count
_WARMUP = 3


Pairs = Mapping[tuple[int, int], Link]


def drawn(seed: int) -> Pairs:
    """Links of 50 Mbit/s to 1 Gbit/s, the slower the farther."""
    draw = random.Random(seed)
    pairs: dict[tuple[int, int], Link] = {}
    for a in range(HOSTS):
        for b in range(a + 1, HOSTS):
            mbit = round(10 ** draw.uniform(1.7, 3))
            pairs[a, b] = Link(f"{mbit}mbit", f"{round(2 + 18 * draw.random() * 50 / mbit, 1)}ms")
    return pairs


def rates_of(pairs: Pairs) -> list[list[float]]:
    """Bits per second between two hosts, as configured."""
    return [[1.0 if a == b else pairs[min(a, b), max(a, b)].settings()[0] for b in range(HOSTS)] for a in range(HOSTS)]


def rate_of(ring: Sequence[int], pairs: Pairs = PAIRS) -> float:
    """Bits per second of the slowest link of a ring of hosts, as configured."""
    rates = rates_of(pairs)
    return min(rates[a][b] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True))


def share_of(pairs: Pairs = PAIRS) -> float:
    """Bits per second of the slowest pair where all pairs send, with the routes of the configured rates."""
    rates, own = rates_of(pairs), HOST_LINK.settings()[0]
    return slowest_share(rates, best_routes(rates, [[0.0] * HOSTS] * HOSTS, [own] * HOSTS))


def bound_s(system: str, ring: Sequence[int], num_elements: int, compute_s: float, pairs: Pairs = PAIRS) -> float:
    """Seconds of a step that no schedule on this ring, or with these pairs, can undercut."""
    if system in BITS:
        return max(compute_s, _FORWARD * compute_s + 2 * BITS[system] * num_elements / HOSTS / share_of(pairs))
    rate = rate_of(ring, pairs)
    if SYSTEMS[system][0] == "gradient_allreduce":
        return max(compute_s, _FORWARD * compute_s + 64 * num_elements * (HOSTS - 1) / HOSTS / rate)
    return max(compute_s, 8 * num_elements / rate)


def fastest_ring(pairs: Pairs = PAIRS) -> list[int]:
    """Of all rings, by the configured rates."""
    rings = ([0, *rest] for rest in permutations(range(1, HOSTS)))
    return max(rings, key=lambda ring: rate_of(ring, pairs))


def work(folder: Path, model_name: str, compute_s: float, rounds: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    bagua.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for number, (system, (algorithm, options)) in enumerate(SYSTEMS.items(), 1):
        trainings, lines = {}, {}
        for order, asked in ORDERS.items():
            model = EmulatedModel(models.get(model_name), Compute(compute_s, _FORWARD), seed=rank)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            bagua.distribute(model, optimizer, algorithm, rank_order=asked, **options)
            trainings[order] = Training.of(model, optimizer, lambda model=model: detach(model))
            for _ in range(_WARMUP):
                trainings[order].step()
            lines[order] = list(bagua.stats(model).notices)
        times = in_turns(trainings, rounds, f"{system} ({number} of {len(SYSTEMS)})")
        found.append({"system": system, "times_s": times, "notices": lines})
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def detach(model: EmulatedModel) -> None:
    """End the training of `model`."""
    bagua.detach(model)


def in_turns(trainings: Mapping[str, Training], rounds: int, what: str) -> dict[str, list[list[float]]]:
    """Let trainings take turns, and end them. Collective.

    Args:
        what: is measured, for the progress that rank 0 shows.

    Returns:
        seconds of the slowest rank's steps in each turn of each training, without the first step of a turn.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in trainings}
    for turn in range(rounds):
        for name in list(trainings) if turn % 2 else list(trainings)[::-1]:
            dist.barrier()
            steps = torch.tensor([trainings[name].step().step_s for _ in range(_TURN)])
            dist.all_reduce(steps, dist.ReduceOp.MAX)
            times[name].append(steps[1:].tolist())
            if dist.get_rank() == 0:
                progress.show(f"{what}, turn {turn + 1} of {rounds}: {name}")
    for each in trainings.values():
        each.close()
    return times


def measure(
    model_name: str, compute_s: float, rounds: int, folder: Path, limit_s: float, pairs: Pairs
) -> tuple[Any, Any]:
    """Run all systems; returns what rank 0 wrote, and the report of the cluster.

    Raises:
        RuntimeError: a rank failed, or it takes longer than `limit_s`.
    """
    words = ["--worker", str(folder), "--model", model_name, "--compute-ms", f"{1000 * compute_s:g}"]
    with Cluster(HOSTS, HOST_LINK, pairs=pairs, mode="namespaces") as cluster:
        run_ranks(cluster, ["benchmarks.sites", *words, "--rounds", str(rounds)], 1, limit_s)
        return json.loads((folder / "result.json").read_text()), cluster.report()


def run_ranks(cluster: Cluster, module: Sequence[str], each: int, limit_s: float) -> None:
    """Run `python -m` with these words, `each` times on every host.

    Raises:
        RuntimeError: a rank failed, or it takes longer than `limit_s`.
    """
    deadline, size = time.monotonic() + limit_s, each * len(cluster.hosts)
    ranks = [
        cluster.hosts[rank // each].popen(
            [sys.executable, "-m", *module],
            env={**os.environ, "MASTER_ADDR": cluster.hosts[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": str(size),
                 "RANK": str(rank), "GROUP_RANK": str(rank // each), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]  # fmt: skip
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline or any(rank.poll() for rank in ranks):
            raise RuntimeError(f"a rank failed, or took more than {limit_s:g} s")
        time.sleep(0.1)


def rows_of(
    found: Sequence[dict[str, Any]], num_elements: int, compute_s: float, linked: Pairs = PAIRS
) -> list[dict[str, Any]]:
    """Medians of the steps, of the ratios of turns, and the bound of the fastest ring, or of the best routes."""
    rows = []
    for each in found:
        times = each["times_s"]
        pairs = [
            statistics.median(plain) / statistics.median(ordered)
            for plain, ordered in zip(times["ranks"], times["measured"], strict=True)
        ]
        plain_s, ordered_s = (statistics.median(s for turn in times[order] for s in turn) for order in ORDERS)
        bound = bound_s(each["system"], fastest_ring(linked), num_elements, compute_s, linked)
        rows.append(
            {
                "system": each["system"],
                "plain_ms": 1000 * plain_s,
                "ordered_ms": 1000 * ordered_s,
                "paired": statistics.median(pairs),
                "bound_ms": 1000 * bound,
                "efficiency": bound / ordered_s,
                "plain_bound_ms": 1000 * bound_s(each["system"], range(HOSTS), num_elements, compute_s, linked),
                "notices": each["notices"]["measured"],
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sites", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="a model of 2.5 M elements, 2 turns")
    parser.add_argument("--model", metavar="NAME", help="of `bagua bench` (even@11/6000000)")
    parser.add_argument("--compute-ms", type=float, default=150, metavar="MS", help="of a step (%(default)s)")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each (6)")
    parser.add_argument("--limit", type=float, default=900, metavar="S", help="seconds for all (%(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", help="draw the links from it (the links of `PAIRS`)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    name = options.model or ("layers25m/10" if options.quick else "even@11/6000000")
    rounds, compute_s = options.rounds or (2 if options.quick else 6), options.compute_ms / 1000
    if options.worker:
        work(options.worker, name, compute_s, rounds)
        return
    pairs = PAIRS if options.seed is None else drawn(options.seed)
    with tempfile.TemporaryDirectory(prefix="bagua-sites-") as folder:
        found, report = measure(name, compute_s, rounds, Path(folder), options.limit, pairs)
    progress.clear()
    num_elements = models.get(name).num_elements
    rows = rows_of(found, num_elements, compute_s, pairs)
    print(f"{HOSTS} hosts, {num_elements / 1e6:.1f} M fp32 elements, {options.compute_ms:g} ms of compute")
    columns = Columns(
        ("system", -24), ("ranks, ms", 11), ("measured, ms", 14), ("paired", 8), ("bound, ms", 11), ("efficiency", 12)
    )
    print(
        columns.table(
            [
                [row["system"], f"{row['plain_ms']:.0f}", f"{row['ordered_ms']:.0f}", f"{row['paired']:.2f}",
                 f"{row['bound_ms']:.0f}", f"{row['efficiency']:.2f}"]
                for row in rows
            ]
        )
    )  # fmt: skip
    for row in rows:
        print(f"{row['system']}: {'; '.join(row['notices'])}")
    if options.json:
        links = {f"{a}-{b}": [link.bandwidth, link.latency] for (a, b), link in pairs.items()}
        settings = {
            "model": name,
            "num_elements": num_elements,
            "compute_ms": options.compute_ms,
            "rounds": rounds,
            "seed": options.seed,
        }
        facts = {"date": now(), "bagua": bagua.__version__, "machine": describe_machine(), "links": links}
        wire = {"wire": report.wire, "machine_limited": report.machine_limited}
        results_file.write(options.json, {**facts, **wire, "settings": settings, "rows": rows, "measured": found})


if __name__ == "__main__":
    main()
