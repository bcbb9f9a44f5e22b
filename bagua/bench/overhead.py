"""Engine overhead: training steps with and without the engine, and with DistributedDataParallel.

    bagua bench overhead [--quick] [--json FILE]

All cases have 300 parameters (150 linear layers). Both sides of a case run in the same process, in short
blocks that alternate (A B, B A, ...); the ratio is the median over pairs of neighbouring blocks, so that what
else runs on the machine hits both. CPU time, which waiting does not count for, is given too: on a busy
machine it says more than the clock. Garbage collection is off while the clock runs.

- alone: one process, engine on / engine off. `layers` computes for tens of milliseconds a step; `tiny`
  computes almost nothing, so its difference is the time spent in the engine's hooks. A single rank copies
  nothing and sends nothing. Both ways of `zero_grad()` are measured; the larger of the ratios of `layers` counts.
- ranks: two processes on this machine over gloo, Bagua's gradient_allreduce / DistributedDataParallel. Here both
  copy gradients into buckets and exchange them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.bench import progress, results_file, turns
from bagua.bench.layout import Columns
from bagua.bench.machine import describe_machine, now
from bagua.bench.spawned import run_ranks

NUM_LAYERS = 150  # a weight and a bias each: 300 parameters
RATIO_TARGET, ENGINE_MS_TARGET = 1.02, 1.0
Step = Callable[[], None]


class Block(NamedTuple):
    """Milliseconds of one step, the mean of a block: on the clock, and of CPU time of this process."""

    wall: float
    cpu: float


Pair = tuple[Block, Block]  # baseline, Bagua


@dataclass(frozen=True)
class Case:
    """A model and how its gradients are cleared.

    Attributes:
        name: for the table.
        width: features of each layer.
        batch: rows of the input.
        set_to_none: as in `zero_grad`; False keeps the gradient tensors.
    """

    name: str
    width: int
    batch: int
    set_to_none: bool = True


@dataclass(frozen=True)
class Result:
    """Medians of one case; "ms" are on the clock, "cpu_ms" CPU time of this process.

    Attributes:
        case: its name.
        ranks: number of processes.
        baseline, baseline_ms: what Bagua is compared with, and a step of it.
        bagua_ms: a step with Bagua.
        ratio: median over pairs of the ratio.
        ratio_p25, ratio_p75: quartiles of the ratio.
        cpu_ratio: median over pairs of the ratio of CPU times.
        extra_cpu_ms: median over pairs of the difference of CPU times.
        extra_cpu_ms_of_minima: difference of the least CPU times, where the machine disturbed least.
        pairs, steps: number of pairs, and of steps in a block.
    """

    case: str
    ranks: int
    baseline: str
    baseline_ms: float
    bagua_ms: float
    ratio: float
    ratio_p25: float
    ratio_p75: float
    cpu_ratio: float
    extra_cpu_ms: float
    extra_cpu_ms_of_minima: float
    pairs: int
    steps: int


LAYERS = Case("layers", width=256, batch=64)
LAYERS_KEPT = Case("layers, gradients kept", width=256, batch=64, set_to_none=False)
TINY = Case("tiny", width=4, batch=1)
TINY_KEPT = Case("tiny, gradients kept", width=4, batch=1, set_to_none=False)
_QUICK_WIDTH = 16  # of the layers where only few repeats are made


def make_model(width: int) -> nn.Module:
    """Return 150 linear layers in a row."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS)))


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case) -> Step:
    """Return a whole training step: forward, backward, optimizer, clearing of gradients."""
    batch = torch.randn(case.batch, case.width)

    def step() -> None:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.set_to_none)

    return step


def compare(baseline: Step, candidate: Step, pairs: int, steps: int) -> list[Pair]:
    """Time both in `pairs` pairs of blocks of `steps` steps, in alternating order."""

    def block(step: Step) -> Block:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        return Block((time.perf_counter() - wall) / steps * 1000, (time.process_time() - cpu) / steps * 1000)

    for step in (baseline, candidate) * 2:
        block(step)
    gc.collect()
    gc.disable()
    try:
        return turns.pairs(lambda: block(baseline), lambda: block(candidate), pairs)
    finally:
        gc.enable()


def summarise(case: Case, ranks: int, baseline: str, times: Sequence[Pair], steps: int) -> Result:
    """Return the medians of `times`."""
    ratio = turns.quartiles([after.wall / before.wall for before, after in times])
    return Result(
        case=case.name,
        ranks=ranks,
        baseline=baseline,
        baseline_ms=statistics.median(before.wall for before, _ in times),
        bagua_ms=statistics.median(after.wall for _, after in times),
        ratio=ratio.median,
        ratio_p25=ratio.low,
        ratio_p75=ratio.high,
        cpu_ratio=statistics.median(after.cpu / before.cpu for before, after in times),
        extra_cpu_ms=statistics.median(after.cpu - before.cpu for before, after in times),
        extra_cpu_ms_of_minima=min(after.cpu for _, after in times) - min(before.cpu for before, _ in times),
        pairs=len(times),
        steps=steps,
    )


def measure(case: Case, pairs: int, steps: int) -> Result:
    """Measure `case` in this process, which may be one of several ranks; all ranks must call it."""
    size = dist.get_world_size()
    if dist.get_rank() == 0:
        progress.show(f"{case.name}, {size} rank{'s' * (size > 1)}")
    plain = make_model(case.width)
    ours = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-4)
    bagua.distribute(ours, optimizer, "gradient_allreduce")
    reference: nn.Module = plain if size == 1 else DistributedDataParallel(plain, bucket_cap_mb=10)
    try:
        times = compare(
            make_step(reference, torch.optim.SGD(plain.parameters(), lr=1e-4), case),
            make_step(ours, optimizer, case),
            pairs,
            steps,
        )
    finally:
        bagua.detach(ours)
    return summarise(case, size, "engine off" if size == 1 else "DDP", times, steps)


def _sized(case: Case, quick: bool) -> Case:
    return replace(case, width=_QUICK_WIDTH) if quick else case


def measure_alone(quick: bool) -> list[Result]:
    """One process: engine on and off."""
    bagua.init_process_group("gloo")
    try:
        pairs = 1 if quick else 40
        steps = {_sized(LAYERS, quick): 1, _sized(LAYERS_KEPT, quick): 1, TINY: 2, TINY_KEPT: 2}
        return [measure(case, pairs if case.batch > 1 else 2 * pairs, count) for case, count in steps.items()]
    finally:
        bagua.destroy_process_group()


def _rank_main(rank: int, quick: bool, answers: Any) -> None:
    pairs = 1 if quick else 40
    results = [measure(_sized(LAYERS, quick), pairs, 1), measure(TINY, pairs, 2)]
    if rank == 0:
        answers.put(results)


def measure_ranks(quick: bool, size: int = 2) -> list[Result]:
    """Two processes: Bagua beside DistributedDataParallel."""
    answers = mp.get_context("spawn").SimpleQueue()
    run_ranks(_rank_main, size, quick, answers)
    return answers.get()


_COLUMNS = Columns(
    ("case", 24),
    ("ranks", 6),
    ("against", 12),
    ("its ms", 11),
    ("Bagua ms", 10),
    ("ratio", 8),
    ("quartiles", 15),
    ("CPU ratio", 11),
    ("extra CPU ms", 14),
    ("least", 8),
)


def table(results: Sequence[Result]) -> str:
    """Return the results as text."""
    rows = []
    for r in results:
        cells = [r.case, str(r.ranks), r.baseline, f"{r.baseline_ms:.2f}", f"{r.bagua_ms:.2f}"]
        cells += [f"{r.ratio:.3f}", f"{r.ratio_p25:.3f}-{r.ratio_p75:.3f}", f"{r.cpu_ratio:.3f}"]
        rows.append([*cells, f"{r.extra_cpu_ms:.2f}", f"{r.extra_cpu_ms_of_minima:.2f}"])
    return _COLUMNS.table(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, maybe write JSON; 0."""
    parser = argparse.ArgumentParser(
        prog="bagua bench overhead", description="Cost of the engine on a model of 300 parameters."
    )
    parser.add_argument("--quick", action="store_true", help="few repeats, narrow layers: the figures are noise")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    machine = describe_machine()
    results = measure_alone(args.quick) + measure_ranks(args.quick)
    progress.clear()
    print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']:.1f}")
    print(f"torch {machine['torch']}, one thread per rank")
    print(table(results))
    by_name = {result.case: result for result in results if result.ranks == 1}
    ratio = max(by_name[case.name].ratio for case in (LAYERS, LAYERS_KEPT))
    engine_ms = by_name[TINY.name].extra_cpu_ms
    for what, value, target in (
        ("step with the engine / without", ratio, RATIO_TARGET),
        ("engine, CPU ms per step of 300 parameters", engine_ms, ENGINE_MS_TARGET),
    ):
        print(f"{what}: {value:.3f} (target: at most {target}; {'met' if value <= target else 'NOT met'})")
    if args.json is not None:
        report = {
            "date": now(),
            "machine": machine,
            "quick": args.quick,
            "parameters": 2 * NUM_LAYERS,
            "targets": {"ratio": RATIO_TARGET, "engine_ms": ENGINE_MS_TARGET},
            "ratio": ratio,
            "engine_ms": engine_ms,
            "results": [asdict(result) for result in results],
        }
        results_file.write(args.json, report, indent=2)
    return 0
