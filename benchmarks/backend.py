"""The backend beside DDP's other ways to average gradients: `python -m benchmarks.backend [--quick] [--json FILE]`.

One network of linear layers under DistributedDataParallel on 2 ranks of this machine: plain over gloo, over "bagua"
with 8 and 4 bits, with `bagua.interop.ddp_hook`, and with DDP's own hooks. All systems exist at once and take turns
every few steps, in changing order, so that what disturbs the machine disturbs all; compared are steps of the same turn.
Bytes are what a rank sends in a step: counted by Bagua's exchanges, by formula for torch's. PowerSGD has one bucket,
the others have DDP's default.

Between processes of one machine bytes cost next to nothing and codecs cost processor time: this measures what the
backend adds, not what it saves on a network.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.bench import results_file
from bagua.bench.machine import describe_machine, now

RANKS = 2
BASELINE, HOOK = "ddp over gloo", "ddp_hook 8 bits"


@dataclass
class Result:
    """Of one system.

    Attributes:
        step_ms: median time of a step, in milliseconds.
        times_plain: median of its time per turn divided by that of plain DDP in the same turn.
        times_hook: the same, divided by that of `bagua.interop.ddp_hook` with 8 bits.
        sent_kb: sent by a rank in a step, in kB.
        counted: whether bytes were counted, or come from a formula.
    """

    system: str
    step_ms: float
    times_plain: float
    times_hook: float
    sent_kb: float
    counted: bool


@dataclass
class System:
    """A network under one way of averaging.

    Attributes:
        step: trains one step.
        bytes_sent: by this rank so far; None if nobody counts.
        bytes_per_step: by formula.
    """

    step: Callable[[], None]
    bytes_sent: Callable[[], int] | None
    bytes_per_step: float


def ring(nbytes: float) -> float:
    """Bytes that a rank sends in a ring all-reduce."""
    return 2 * nbytes * (RANKS - 1) / RANKS


def make(name: str, width: int, layers: int) -> System:
    """The network under the system `name`. Collective."""
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())))
    exact = ring(sum(param.numel() * 4 for param in net.parameters()))
    backends = {"backend 8 bits": "bagua:uint8", "backend 4 bits": "bagua:int4"}
    group: Any = dist.new_group(backend=backends.get(name, "gloo"))
    one_bucket = "PowerSGD" in name  # with several its hook deadlocks on gloo
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=1 << 20 if one_bucket else None)
    count: Callable[[], int] | None = None
    formula = exact
    if name in backends:
        count = lambda: group.traffic.bytes_sent  # noqa: E731
    elif name == HOOK:
        hook = bagua.interop.ddp_hook("bytegrad", process_group=group)
        model.register_comm_hook(None, hook)
        count = lambda: hook.bytes_sent  # noqa: E731
    elif name == "ddp fp16 hook":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        formula = exact / 2
    elif name == "ddp PowerSGD rank 4":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        vectors = ring(sum(param.numel() * 4 for param in net.parameters() if param.dim() == 1))
        formula = vectors + ring(layers * 2 * 4 * width * 4)  # P and Q of each matrix, in fp32
    elif name != BASELINE:
        raise ValueError(f"system {name!r} is unknown")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return System(step, count, formula)


SYSTEMS = (BASELINE, "backend 8 bits", "backend 4 bits", HOOK, "ddp fp16 hook", "ddp PowerSGD rank 4")
WARMUP = 5


def rank_main(rank: int, store: str, args: argparse.Namespace, results: Any) -> None:
    """One of the ranks: run all systems in turns; rank 0 sends the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    systems = {name: make(name, args.width, args.layers) for name in SYSTEMS}
    for system in systems.values():
        for _ in range(WARMUP):
            system.step()
    before = {name: system.bytes_sent() for name, system in systems.items() if system.bytes_sent is not None}
    order, seconds = random.Random(0), {name: [] for name in SYSTEMS}
    for _ in range(args.turns):
        for name in order.sample(SYSTEMS, len(SYSTEMS)):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(args.steps):
                systems[name].step()
            seconds[name].append((time.perf_counter() - started) / args.steps)
    if rank == 0:
        found = []
        for name, system in systems.items():
            sent = system.bytes_per_step
            if system.bytes_sent is not None:
                sent = (system.bytes_sent() - before[name]) / (args.turns * args.steps)
            plain, hook = (
                statistics.median(mine / theirs for mine, theirs in zip(seconds[name], seconds[other], strict=True))
                for other in (BASELINE, HOOK)
            )
            step_ms, counted = statistics.median(seconds[name]) * 1e3, system.bytes_sent is not None
            found.append(Result(name, step_ms, plain, hook, sent / 1e3, counted))
        results.send(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> list[Result]:
    """Start the ranks and return rank 0's results."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, f"{folder}/store", args, sender), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        sender.close()
        while not receiver.poll(1):
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
            if failed:
                raise RuntimeError(f"rank {failed[0]} ended with exit code {ranks[failed[0]].exitcode}")
        results = receiver.recv()
        for process in ranks:
            process.join()
    return results


def table(results: list[Result]) -> str:
    """The results as text."""
    lines = [f"{'system':22}{'ms/step':>9}{'x plain':>9}{'x hook':>9}{'kB/step':>10}"]
    lines += [
        f"{each.system:22}{each.step_ms:9.2f}{each.times_plain:9.2f}{each.times_hook:9.2f}{each.sent_kb:10.1f}"
        f"{'' if each.counted else '  by formula'}"
        for each in results
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description="The backend beside DDP, ddp_hook and DDP's own hooks, on 2 ranks.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="a small network and few steps: that it runs")
    parser.add_argument("--width", type=int, default=768, help="of the square layers (%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="number of layers (%(default)s)")
    parser.add_argument("--turns", type=int, default=30, help="turns of each system (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn (%(default)s)")
    args = parser.parse_args(argv)
    if args.quick:
        args.width, args.layers, args.turns, args.steps = 192, 2, 3, 2
    machine = describe_machine()
    results = measure(args)
    print(table(results))
    if args.json is not None:
        size = {name: getattr(args, name) for name in ("width", "layers", "turns", "steps")}
        report = {"date": now(), "machine": machine, "quick": args.quick, "ranks": RANKS, **size}
        results_file.write(args.json, {**report, "results": [asdict(each) for each in results]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
