"""What one and two bits for each gradient element do to a small GPT, with and without error feedback.

    python -m benchmarks.convergence.one_bit [--json FILE] [--task NAME] [--seeds 21,22] [--steps N] [--only NAMES]
        [--workers N]

A transformer on bytes of source code, 4 simulated ranks, warm-up and half a cosine. AdamW and SGD with momentum each
have their own learning rate; nothing else differs between the rows of an optimizer. The figure is the validation loss
after the last step. Every tenth file is held out. The tasks `small` and `large` have the standard library as text,
`small-headers` and `headers` are `small` and `large` on the C++ headers of torch.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import multiprocessing
import sysconfig
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bagua
from bagua.codecs import Eden
from benchmarks.char_lm import draw_windows, even_windows
from benchmarks.overhead import describe_machine

RANKS, BATCH = 4, 4
WARM = 0.1  # of the steps


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

# Algorithm and options by name; None where nothing is compressed.
ROWS: Mapping[str, Mapping[str, Any] | None] = {
    "gradient_allreduce": None,
    "eden 1 bit": {"codec": Eden(bits=1), "error_feedback": False, "running_scale": False},
    "eden 1 bit + scale": {"codec": Eden(bits=1), "error_feedback": False, "running_scale": True},
    "sign + feedback": {"codec": "sign", "error_feedback": True},
    "eden 1 bit + feedback": {"codec": Eden(bits=1), "error_feedback": True},
    "sign": {"codec": "sign", "error_feedback": False},
    "eden 2 bits": {"codec": Eden(bits=2), "error_feedback": False, "running_scale": False},
    "eden 2 bits + scale": {"codec": Eden(bits=2), "error_feedback": False, "running_scale": True},
    "eden 2 bits + feedback": {"codec": Eden(bits=2), "error_feedback": True},
}


class Run(NamedTuple):
    """What came of one run; `mb` is sent by a rank."""

    optimizer: str
    row: str
    seed: int
    loss: float
    mb: float
    seconds: float


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(y.transpose(1, 2).reshape(b, t, width))
        return x + self.mlp(self.before_mlp(x))


class ByteGPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        width = task.width
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(task.context, width) * 0.02)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(task.layers)))
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


def train(job: tuple[str, str, str, int, int]) -> Run:
    """Train 4 ranks in this process."""
    name, kind, row, seed, steps = job
    task = TASKS[name]
    torch.set_num_threads(1)
    started, (text, held_out, _) = time.perf_counter(), load_source(task.text)
    generator = torch.Generator().manual_seed(seed)
    batches = [[draw_windows(text, BATCH, task.context, generator) for _ in range(RANKS)] for _ in range(steps)]
    optimizers: dict[Tensor, torch.optim.Optimizer] = {}  # by the first parameter

    def optimizer(params: Any) -> torch.optim.Optimizer:
        held = list(params)
        rate = task.rates[kind]
        adamw = kind == "adamw"
        made = torch.optim.AdamW(held, lr=rate) if adamw else torch.optim.SGD(held, lr=rate, momentum=0.9)
        optimizers[held[0]] = made
        return made

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        grown = min(1.0, (step + 1) / (WARM * steps))
        for group in optimizers[next(module.parameters())].param_groups:
            group["lr"] = task.rates[kind] * grown * 0.5 * (1 + math.cos(math.pi * step / steps))
        inputs, following = batches[step][rank]
        return F.cross_entropy(module(inputs).flatten(0, 1), following.flatten())

    options = ROWS[row]
    algorithm = bagua.algorithms.get("gradient_allreduce" if options is None else "bytegrad", **(options or {}))
    result = bagua.simulate(
        algorithm,
        ranks=RANKS,
        model=lambda: ByteGPT(task),
        loss=loss,
        steps=steps,
        optimizer=optimizer,
        seed=seed,
        bucket_bytes=task.bucket_bytes,
    )
    with torch.no_grad():
        inputs, following = even_windows(held_out, 512, task.context)
        final = F.cross_entropy(result.models[0](inputs).flatten(0, 1), following.flatten()).item()
    mb = sum(stats.total.bytes_sent for stats in result.stats) / RANKS / 1e6
    return Run(kind, row, seed, final, mb, time.perf_counter() - started)


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Mean loss of each row over its seeds, and the percent above gradient_allreduce on the same seeds."""
    rows = []
    for kind in ("adamw", "sgd"):
        exact = {run.seed: run.loss for run in runs if (run.optimizer, run.row) == (kind, "gradient_allreduce")}
        for name in ROWS:
            mine = [run for run in runs if (run.optimizer, run.row) == (kind, name) and run.seed in exact]
            if mine:
                behind = [100 * (run.loss / exact[run.seed] - 1) for run in mine]
                mean, mb = (sum(values) / len(mine) for values in ([r.loss for r in mine], [r.mb for r in mine]))
                row = {"optimizer": kind, "row": name, "loss": mean, "mb": mb, "seeds": [r.seed for r in mine]}
                rows.append(row | {"percent_behind": sum(behind) / len(behind), "each": behind})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = ["| optimizer | codec | validation loss | % above full precision | of each seed | MB sent a rank |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        each = ", ".join(f"{value:+.1f}" for value in row["each"])
        figures = f"{row['loss']:.3f} | {row['percent_behind']:+.1f} | {each} | {row['mb']:.1f}"
        lines.append(f"| {row['optimizer']} | {row['row']} | {figures} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, maybe write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence.one_bit", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results there, after every run")
    parser.add_argument("--task", choices=list(TASKS), default="small", help="default: %(default)s")
    parser.add_argument("--seeds", default="21,22", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--optimizers", default="adamw,sgd", help="default: %(default)s")
    parser.add_argument("--only", default=",".join(ROWS), metavar="NAMES", help="rows: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    args = parser.parse_args(argv)
    kinds, names, seeds = args.optimizers.split(","), args.only.split(","), map(int, args.seeds.split(","))
    jobs = [
        (args.task, kind, name, seed, args.steps) for seed in seeds for name in ROWS if name in names for kind in kinds
    ]
    runs: list[Run] = []
    task = TASKS[args.task]
    header = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "task": args.task,
        "data": {"what": task.text, "digest": load_source(task.text)[2]},
        "steps": args.steps,
        "ranks": RANKS,
        "batch_per_rank": BATCH,
        "context": task.context,
        "parameters": sum(param.numel() for param in ByteGPT(task).parameters()),
        "rates": dict(task.rates),
    }
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        for run in pool.map(train, jobs):
            runs.append(run)
            print(f"[{len(runs)}/{len(jobs)}] {run}", flush=True)
            if args.json is not None:
                report = header | {"rows": summarise(runs), "runs": [each._asdict() for each in runs]}
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{table(summarise(runs))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
