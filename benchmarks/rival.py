"""Against the strongest rival on a slow link: `python -m benchmarks.rival [--json FILE] [--bandwidth 200mbit]`.

The rival is PowerSGD of rank 8 as a communication hook of DistributedDataParallel. A real network (four linear layers,
2.37 M parameters) learns from a noisy teacher on 2 emulated hosts: 300 steps without a limit for the loss on held-out
data, then steps on the capped link for the time. All start from the same weights and see the same batches. Every
system runs twice on the capped link, in turns; the mean of all its steps counts. Needs root or user namespaces.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.bench import progress, results_file
from bagua.bench.baselines import with_power_sgd
from bagua.bench.layout import Columns
from bagua.bench.machine import describe_machine, now
from bagua.lab import Cluster, Link

INPUTS, WIDTH, CLASSES, BATCH = 256, 1024, 10, 64
TIMED = 25
RANKS = {"ddp": 0, "ddp powersgd r1": 1, "ddp powersgd r8": 8}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient_allreduce": ("gradient_allreduce", {}),
    "bytegrad": ("bytegrad", {}),
    "int4": ("gradient_allreduce", {"codec": "int4"}),
    "1 bit": ("gradient_allreduce", {"codec": "sign"}),
    "1 % top_k": ("gradient_allreduce", {"codec": "top_k"}),
    "power_sgd r2": ("power_sgd", {"rank": 2}),
    "power_sgd r4": ("power_sgd", {"rank": 4}),
    "power_sgd r8": ("power_sgd", {"rank": 8}),
    "local_sgd": ("local_sgd", {"communication_interval": 8}),
}


class Task:
    """Inputs of a rank, and what the teacher says of them."""

    def __init__(self, rank: int) -> None:
        made = torch.Generator().manual_seed(7)
        self._teacher = nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, CLASSES))
        for param in self._teacher.parameters():
            param.data = torch.randn(param.shape, generator=made) / param.shape[-1] ** 0.5
        self._generator = torch.Generator().manual_seed(100 + rank)
        self.held_out = self.batch(4096, torch.Generator().manual_seed(99))

    @torch.no_grad()
    def batch(self, size: int = BATCH, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and labels; a tenth of the logits' spread is noise."""
        generator = generator or self._generator
        x = torch.randn(size, INPUTS, generator=generator)
        logits = 4 * self._teacher(x)
        return x, (logits + 0.1 * torch.randn(logits.shape, generator=generator)).argmax(1)


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """The network under the system `name`, and what takes it off."""
    torch.manual_seed(0)
    sizes = [INPUTS, WIDTH, WIDTH, WIDTH]
    layers = [each for a, b in itertools.pairwise(sizes) for each in (nn.Linear(a, b), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name in OURS:
        algorithm, options = OURS[name]
        bagua.distribute(model, optimizer, algorithm, **options)
        return model, optimizer, partial(_detach, model)
    wrapped = with_power_sgd(model, RANKS[name]) if RANKS[name] else DistributedDataParallel(model)
    return wrapped, optimizer, lambda: None


def _detach(model: nn.Module) -> None:
    bagua.detach(model)


def train(name: str, steps: int) -> tuple[float, list[float]]:
    """Loss on held-out data (of the mean weights) and seconds of each step, of the slower rank."""
    task = Task(dist.get_rank())
    model, optimizer, close = make(name)
    seconds: list[float] = []
    for _ in range(steps):
        x, y = task.batch()
        started = time.perf_counter()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    if name in OURS:
        bagua.average_parameters(model)
    with torch.no_grad():
        x, y = task.held_out
        loss = float(cross_entropy(model.eval()(x), y))
    close()
    slower = torch.tensor(seconds)
    dist.all_reduce(slower, dist.ReduceOp.MAX)
    return loss, slower.tolist()


def work(names: Sequence[str], steps: int, folder: Path) -> None:
    """One rank: losses first, then, when the link is capped, times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses: dict[str, float] = {}
    for number, name in enumerate(names, 1):
        losses[name] = train(name, steps)[0]
        if dist.get_rank() == 0:
            progress.show(f"loss {number} of {len(names)}: {name}")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "uncapped").touch()
    while not (folder / "capped").exists():
        time.sleep(0.05)
    dist.barrier()
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in (1, 2):
        for number, name in enumerate(names, 1):
            if dist.get_rank() == 0:
                progress.show(f"times, turn {turn} of 2, {number} of {len(names)}: {name}")
            times[name] += train(name, TIMED + 5)[1][5:]  # the hook's first steps are exact
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps({"losses": losses, "times": times}))
    dist.barrier()
    dist.destroy_process_group()


def measure(names: Sequence[str], steps: int, bandwidth: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run all systems on 2 hosts.

    Raises:
        RuntimeError: a rank failed, or it takes longer than `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    with Cluster(2, Link(latency="1us"), mode="namespaces") as cluster:
        command = [sys.executable, "-m", "benchmarks.rival", "--worker", str(folder), "--steps", str(steps)]
        environment = {"MASTER_ADDR": cluster.hosts[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        ranks = [
            host.popen(
                [*command, "--only", ";".join(names)],
                env={**os.environ, **environment, "RANK": str(rank), "GROUP_RANK": str(rank),
                     "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"},
            )
            for rank, host in enumerate(cluster.hosts)
        ]  # fmt: skip
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > deadline or any(rank.poll() for rank in ranks):
                raise RuntimeError(f"a rank failed, or took more than {limit_s:g} s")
            if (folder / "uncapped").exists() and not (folder / "capped").exists():
                for host in cluster.hosts:
                    host.set_link(Link(bandwidth=bandwidth))
                (folder / "capped").touch()
            time.sleep(0.1)
    return json.loads((folder / "result.json").read_text())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rival",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"systems: {'; '.join([*RANKS, *OURS])}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--bandwidth", default="200mbit", help="of the capped link (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="for the loss (%(default)s)")
    parser.add_argument(
        "--only", metavar="NAMES", default=";".join([*RANKS, *OURS]), help="systems, separated by semicolons (all)"
    )
    parser.add_argument("--limit", type=float, default=900, metavar="S", help="seconds for all (%(default)s)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.only.split(";")
    unknown = sorted(set(names) - {*RANKS, *OURS})
    if unknown:
        parser.error(f"--only: unknown {', '.join(unknown)}; there are {', '.join([*RANKS, *OURS])}")
    if options.worker:
        work(names, options.steps, options.worker)
        return
    with tempfile.TemporaryDirectory(prefix="bagua-rival-") as folder:
        found = measure(names, options.steps, options.bandwidth, Path(folder), options.limit)
    progress.clear()
    rows = [
        {"system": name, "step_ms": 1000 * statistics.fmean(found["times"][name]), "loss": found["losses"][name]}
        for name in names
    ]
    print(f"2 hosts, {options.bandwidth}, loss after {options.steps} steps")
    columns = Columns(("system", -24), ("step ms", 10), ("loss", 8))
    print(columns.table([[row["system"], f"{row['step_ms']:.1f}", f"{row['loss']:.3f}"] for row in rows]))
    if options.json:
        facts = {"date": now(), "machine": describe_machine(), "bandwidth": options.bandwidth, "steps": options.steps}
        results_file.write(options.json, {**facts, "rows": rows, "times_s": found["times"]})


if __name__ == "__main__":
    main()
