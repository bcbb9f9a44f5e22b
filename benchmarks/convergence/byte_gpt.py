"""A small GPT on bytes, its texts, and what the comparisons on it share: training, options, header and report.

Used by `one_bit` and `periodic`. 4 simulated ranks, warm-up of the learning rate and half a cosine. Every tenth file of
a text is held out. The tasks `small` and `large` have the standard library as text, `small-headers` and `headers` are
`small` and `large` on the C++ headers of torch.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bagua
from bagua.algorithms import Algorithm
from bagua.simulation import Simulation
from benchmarks.char_lm import draw_windows, even_windows
from benchmarks.convergence.training import Schedule
from benchmarks.overhead import describe_machine

__all__ = [
    "MATRIX_OPTIMIZERS",
    "MUON_RATE",
    "OTHER_OPTIMIZERS",
    "OWN_OPTIMIZERS",
    "TASKS",
    "Block",
    "ByteGPT",
    "Job",
    "Task",
    "base_parser",
    "held_out_loss",
    "load_source",
    "make_optimizers",
    "run_jobs",
    "train_ranks",
]

RANKS, BATCH = 4, 4
WARM = 0.1  # of the steps
MUON_RATE = 0.02
#: Optimizers of algorithms that need one of their own, by the algorithm's name: with the learning rate and the weight
#: decay of AdamW, decoupled, and the defaults of their policies. What `demo` gives SGD is a sign.
OWN_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "qadam": partial(bagua.optim.QAdam, decoupled_weight_decay=True),
    "zero_one_adam": partial(bagua.optim.ZeroOneAdam, decoupled_weight_decay=True),
    "demo": torch.optim.SGD,
}
#: Optimizers of the matrices of the blocks, by the family or by the algorithm that needs this one; AdamW trains the
#: rest. What `dion` gives SGD is orthonormalised, so the learning rate is that of Muon.
MATRIX_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "muon": torch.optim.Muon,
    "dion": torch.optim.SGD,
}
#: Optimizers of torch that no algorithm treats apart, with learning rates that were not tuned.
OTHER_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=2e-2),
    "adamax": partial(torch.optim.Adamax, lr=4e-3),
    "amsgrad": partial(torch.optim.AdamW, lr=4e-3, amsgrad=True),
    "nadam": partial(torch.optim.NAdam, lr=4e-3),
    "radam": partial(torch.optim.RAdam, lr=4e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
}


class Task(NamedTuple):
    """A model, a text and the learning rates by optimizer."""

    context: int
    width: int
    layers: int
    text: str
    rates: Mapping[str, float]
    bucket_bytes: int


TASKS: Mapping[str, Task] = {
    "small": Task(32, 48, 2, "stdlib", {"adamw": 4e-3, "sgd": 0.05}, 96 * 1024),
    "small-headers": Task(32, 48, 2, "headers", {"adamw": 4e-3, "sgd": 0.05}, 96 * 1024),
    "large": Task(64, 128, 3, "stdlib", {"adamw": 3e-3, "sgd": 0.05}, 1 << 20),
    "headers": Task(64, 128, 3, "headers", {"adamw": 3e-3, "sgd": 0.05}, 1 << 20),
}


class Block(nn.Module):
    """Attention with four heads and an MLP, each after a norm and added to its input: [B, T, width].

    Args:
        width: of the features.
        causal: no position sees a later one.
    """

    def __init__(self, width: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return features [B, T, width]."""
        b, t, width = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.mixed(y.transpose(1, 2).reshape(b, t, width))
        return x + self.mlp(self.before_mlp(x))


class ByteGPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        width = task.width
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(task.context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(task.layers)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 256)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, 256] of bytes [B, T]."""
        return self.out(self.norm(self.blocks(self.token(tokens) + self.position[: tokens.shape[1]])))


@lru_cache(maxsize=1)
def load_source(text: str) -> tuple[Tensor, Tensor, str]:
    """Return the bytes to train on, those held out, and a digest of both."""
    if text == "stdlib":
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    else:
        files = sorted((Path(torch.__file__).parent / "include" / "c10").rglob("*.h"))
    parts = [file.read_bytes() for file in files]
    held_out = b"".join(parts[9::10])
    train = b"".join(part for index, part in enumerate(parts) if index % 10 != 9)
    digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()[:16]
    to_train, to_test = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out))
    return to_train.long(), to_test.long(), digest


def make_optimizers(kind: str, params: Sequence[nn.Parameter], task: Task) -> list[torch.optim.Optimizer]:
    """Return the inner optimizers. Those of matrices take those of the blocks, not embeddings and output."""
    if kind == "sgd":
        return [torch.optim.SGD(params, lr=task.rates["sgd"], momentum=0.9)]
    if kind == "adamw":
        return [torch.optim.AdamW(params, lr=task.rates["adamw"])]
    if kind in OTHER_OPTIMIZERS:
        return [OTHER_OPTIMIZERS[kind](params)]
    if kind in OWN_OPTIMIZERS:
        return [OWN_OPTIMIZERS[kind](params, lr=task.rates["adamw"], weight_decay=0.01)]
    matrices = [p for p in params if p.dim() == 2 and p.shape[0] != 256 and p.shape[0] != task.context]
    inner = {id(p) for p in matrices}
    rest = [p for p in params if id(p) not in inner]
    return [
        MATRIX_OPTIMIZERS[kind](matrices, lr=MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=task.rates["adamw"]),
    ]


class Job(NamedTuple):
    """One run: names of the task, of the optimizer and of the row; number of ranks."""

    task: str
    optimizer: str
    row: str
    seed: int
    steps: int
    ranks: int = RANKS


def train_ranks(job: Job, algorithm: Algorithm) -> tuple[Simulation, float]:
    """Train the ranks in this process; returns what came of it, and the seconds."""
    task = TASKS[job.task]
    torch.set_num_threads(1)
    started, (text, _, _) = time.perf_counter(), load_source(task.text)
    generator = torch.Generator().manual_seed(job.seed)
    batches = [[draw_windows(text, BATCH, task.context, generator) for _ in range(job.ranks)] for _ in range(job.steps)]
    schedules: dict[int, Schedule] = {}  # by the identity of the first parameter

    def optimizer(params: Any) -> list[torch.optim.Optimizer]:
        made = make_optimizers(job.optimizer, list(params), task)
        schedules[id(params[0])] = Schedule(made, job.steps, WARM)
        return made

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        schedules[id(next(module.parameters()))].set(step)
        inputs, following = batches[step][rank]
        return F.cross_entropy(module(inputs).flatten(0, 1), following.flatten())

    result = bagua.simulate(
        algorithm,
        ranks=job.ranks,
        model=lambda: ByteGPT(task),
        loss=loss,
        steps=job.steps,
        optimizer=optimizer,
        seed=job.seed,
        bucket_bytes=task.bucket_bytes,
    )
    return result, time.perf_counter() - started


def held_out_loss(task: Task, model: nn.Module) -> float:
    """Mean cross entropy on 512 windows of the text held out."""
    inputs, following = even_windows(load_source(task.text)[1], 512, task.context)
    with torch.no_grad():
        return F.cross_entropy(model(inputs).flatten(0, 1), following.flatten()).item()


def base_parser(
    prog: str, description: str | None, *, seeds: str, steps: int, optimizers: str, rows: Sequence[str]
) -> argparse.ArgumentParser:
    """Return a parser of the options that both comparisons have, with their defaults."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results there, after every run")
    parser.add_argument("--task", choices=list(TASKS), default="small", help="default: %(default)s")
    parser.add_argument("--seeds", default=seeds, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=steps, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=RANKS, help="default: %(default)s")
    parser.add_argument("--optimizers", default=optimizers, help="default: %(default)s")
    parser.add_argument("--only", default=",".join(rows), metavar="NAMES", help="rows: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    return parser


class _Run(Protocol):
    """A named tuple that pickles."""

    def _asdict(self) -> dict[str, Any]: ...


_R = TypeVar("_R", bound=_Run)


def run_jobs(
    args: argparse.Namespace,
    jobs: Sequence[Job],
    train: Callable[[Job], _R],
    summarise: Callable[[Sequence[_R]], list[dict[str, Any]]],
    rates: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Run the jobs in processes, write `args.json` after each, and return the rows."""
    task = TASKS[args.task]
    header = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "task": args.task,
        "data": {"what": task.text, "digest": load_source(task.text)[2]},
        "steps": args.steps,
        "ranks": args.ranks,
        "batch_per_rank": BATCH,
        "context": task.context,
        "parameters": sum(param.numel() for param in ByteGPT(task).parameters()),
        "rates": dict(rates),
    }
    runs: list[_R] = []
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        for run in pool.map(train, jobs):
            runs.append(run)
            print(f"[{len(runs)}/{len(jobs)}] {run}", flush=True)
            if args.json is not None:
                report = header | {"rows": summarise(runs), "runs": [each._asdict() for each in runs]}
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    return summarise(runs)
