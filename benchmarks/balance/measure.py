"""What batches cost on each rank, how long a plan takes, and a training with and without balance."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bagua.bench import progress
from bagua.data import LoadBalancingDistributedSampler, TokenBudgetBatchSampler
from benchmarks.balance.contenders import CONTENDERS, Missing, seed

__all__ = ["compare", "plan_a_million", "train"]

ROOT = Path(__file__).resolve().parents[2]


def compare(contender: str, lengths: Tensor, budget: float, ranks: int) -> dict[str, Any] | str:
    """Return the figures of a contender, or why there are none.

    Costs of a rank in a step: padded tokens (samples times the longest) and real ones. Imbalance is the largest over
    the mean of the ranks, averaged over the steps. Waste is padding over real tokens.
    """
    seed()
    begun = time.perf_counter()
    try:
        by_rank = CONTENDERS[contender](lengths, budget, ranks)
    except Missing as missing:
        return str(missing)
    seconds = time.perf_counter() - begun
    counts = [len(batches) for batches in by_rank]
    steps = [step for step in zip(*by_rank, strict=False) if all(step)]
    padded = torch.tensor([[len(b) * lengths[b].max().item() for b in step] for step in steps], dtype=torch.float64)
    real = torch.tensor([[lengths[b].sum().item() for b in step] for step in steps], dtype=torch.float64)
    seen = [sample for batches in by_rank for batch in batches for sample in batch]
    return {
        "steps": len(steps),
        "unequal_steps": max(counts) - min(counts),
        "padded_max_over_mean": round(_imbalance(padded), 4),
        "real_max_over_mean": round(_imbalance(real), 4),
        "padding_over_real": round((padded.sum() / real.sum()).item() - 1, 4),
        "largest_batch_tokens": padded.max().item(),
        "missing": len(lengths) - len(set(seen)),
        "repeated": len(seen) - len(set(seen)),
        "seconds_for_all_ranks": round(seconds, 3),
    }


def _imbalance(cost: Tensor) -> float:
    return (cost.amax(1) / cost.mean(1)).mean().item()


def plan_a_million(lengths: Tensor) -> dict[str, float]:
    """Return seconds to plan an epoch of these lengths for 8 ranks, medians of three."""
    times: dict[str, list[float]] = {"TokenBudgetBatchSampler": [], "LoadBalancingDistributedSampler": []}
    for _ in range(3):
        begun = time.perf_counter()
        len(TokenBudgetBatchSampler(lengths, 16_000, 8, 0))
        times["TokenBudgetBatchSampler"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        LoadBalancingDistributedSampler(lengths, lengths, 8, 0).all_indices()
        times["LoadBalancingDistributedSampler"].append(time.perf_counter() - begun)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def train(ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Run examples/balanced_lm.py with both samplers in turn; return each one's results and the ratio of rates."""
    results: dict[str, list[dict[str, Any]]] = {"plain": [], "balanced": []}
    for number in range(1, rounds + 1):
        for kind, found in results.items():
            progress.show(f"training with the {kind} sampler, round {number} of {rounds}")
            found.append(_run_example(ranks, kind, steps))
    progress.clear()
    rate = {kind: statistics.median(r["tokens_per_s"] for r in found) for kind, found in results.items()}
    return {"runs": results, "tokens_per_s": rate, "gain": round(rate["balanced"] / rate["plain"], 2)}


def _run_example(ranks: int, kind: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "bagua.cli.main", "run", "--nproc-per-node", str(ranks)]
        command += ["examples/balanced_lm.py", "--sampler", kind, "--epochs", "1", "--steps", str(steps)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, "--json", str(file)], cwd=ROOT, env=environment, check=True, timeout=300, capture_output=True
        )
        return json.loads(file.read_text())
