"""Random models, with tied, frozen, nested and root-level parameters, stay in sync."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.engine.training import distributed, equal, values
from tests.rank_pool import RankPool

WIDTH = 4


class Random(nn.Module):
    """A chain of parts after a specification: (kind, frozen, tied to which earlier part, skipped in which steps)."""

    def __init__(self, spec: list[dict[str, Any]], root: bool) -> None:
        super().__init__()
        self.spec = spec
        self.root = nn.Parameter(torch.randn(WIDTH)) if root else None
        holder: nn.Module = self
        self.parts: list[str] = []
        for number, part in enumerate(spec):
            layer: nn.Module = {
                "linear": lambda: nn.Linear(WIDTH, WIDTH),
                "nobias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
                "norm": lambda: nn.LayerNorm(WIDTH),
                "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 33), nn.Tanh(), nn.Linear(33, WIDTH)),
            }[part["kind"]]()
            if part["tied"] is not None and part["kind"] in ("linear", "nobias"):
                other = self.get_submodule(self.parts[part["tied"] % number]) if number else layer
                if isinstance(other, nn.Linear):
                    layer.weight = other.weight
            elif part["frozen"]:
                layer.requires_grad_(False)
            name = f"part{number}"
            holder.add_module(name, layer)
            path = f"{self.parts[-1]}.{name}" if holder is not self and self.parts else name
            self.parts.append(path if holder is not self else name)
            if part["nest"]:
                holder = layer
            elif holder is not self:
                holder = self

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        if self.root is not None:
            x = x * self.root
        for number, (path, part) in enumerate(zip(self.parts, self.spec, strict=True)):
            if (step + rank * part["by_rank"]) % part["skip_every"] == part["skip_every"] - 1 and number:
                continue
            layer = self.get_submodule(path)
            x = x + (layer(x) if not isinstance(layer, nn.Sequential) else layer[2](layer[1](layer[0](x)))).tanh()
        return x


PART = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["linear", "nobias", "norm", "wide"]),
        "frozen": st.booleans(),
        "tied": st.one_of(st.none(), st.integers(0, 9)),
        "nest": st.booleans(),
        "skip_every": st.sampled_from([2, 3, 1000]),
        "by_rank": st.booleans(),
    }
)


def drive(spec: list[dict], root: bool, bucket_bytes: int, algorithm: str) -> tuple[dict, list[dict], list[dict]]:
    """Final weights; and of each step the synchronised gradients and the local ones they must be the mean of."""
    rank = dist.get_rank()
    model, optimizer = distributed(lambda: Random(spec, root), algorithm, bucket_bytes=bucket_bytes)
    local = Random(spec, root)
    synced, own = [], []
    for step in range(4):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(17 * rank + step))
        local.load_state_dict(model.state_dict())
        for each in (model, local):
            each.zero_grad()
            loss = each(x, step, rank).square().mean()
            loss.backward()
        synced.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        own.append({n: p.grad.clone() for n, p in local.named_parameters() if p.grad is not None})
        optimizer.step()
    return values(model), synced, own


RUNS = {
    "spec": st.lists(PART, min_size=1, max_size=6),
    "bucket_bytes": st.sampled_from([1, 50, 300, 1 << 20]),
    "algorithm": st.sampled_from(["gradient_allreduce", "bytegrad"]),
    "size": st.sampled_from([2, 2, 3]),
}
HOW = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@settings(HOW, max_examples=20)
@given(**RUNS)
def test_random_models_stay_in_sync(
    pool: RankPool, spec: list[dict], bucket_bytes: int, algorithm: str, size: int
) -> None:
    check(pool, spec, bucket_bytes, algorithm, size)


@pytest.mark.slow
@settings(HOW, max_examples=200)
@given(**RUNS)
def test_many_random_models_stay_in_sync(
    pool: RankPool, spec: list[dict], bucket_bytes: int, algorithm: str, size: int
) -> None:
    check(pool, spec, bucket_bytes, algorithm, size)


def check(pool: RankPool, spec: list[dict], bucket_bytes: int, algorithm: str, size: int) -> None:
    # The root-level parameter comes first and is always used, so that every model has something to train.
    results = pool.run(size, drive, spec, True, bucket_bytes, algorithm)
    for weights, synced, _ in results:
        assert equal(weights, results[0][0])
        assert equal(synced, results[0][1])
    for step in range(4):
        used = set().union(*(own[step] for _, _, own in results))
        assert set(results[0][1][step]) == used, "exactly what some rank used has a gradient"
        for name in used:
            parts = [own[step].get(name, torch.zeros(())) for _, _, own in results]
            want = sum(parts[1:], parts[0]) / size
            top = max(float(grad.abs().max()) for _, _, own in results for grad in own[step].values())
            bound = 1e-6 * max(1.0, top) if algorithm == "gradient_allreduce" else 2 * 2 * top * 0.51 / 255 + 1e-6
            assert (results[0][1][step][name] - want).abs().max() <= bound, (step, name)
