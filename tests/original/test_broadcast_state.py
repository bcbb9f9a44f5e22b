"""Weights and what optimizers remember become rank 0's, where ranks have trained apart before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.original.training import WRAPPERS, make_model, train, wrap
from tests.rank_pool import RankPool

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.2}),
    ("Adam", {"lr": 0.2, "weight_decay": 0.1}),
    ("Rprop", {"lr": 0.2}),
]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _states(wrapper: str) -> list[Any]:
    import bagua.torch_api as api

    rank, seen = dist.get_rank(), []
    for name, options in OPTIMIZERS:
        model = make_model(rank)
        optimizer = getattr(torch.optim, name)(model.parameters(), **{**options, "lr": options["lr"] * (rank + 1)})
        train(model, optimizer, rank, range(10))
        algorithm = api.algorithms.gradient_allreduce.GradientAllReduceAlgorithm(hierarchical=True)
        wrap(wrapper, model, optimizer, algorithm)
        state = optimizer.state_dict()
        seen.append([(key, value.tolist()) for key, value in sorted(model.state_dict().items())])
        seen.append({k: {n: _plain(v) for n, v in sorted(each.items())} for k, each in state["state"].items()})
        seen.append([group["lr"] for group in state["param_groups"]])
    return seen


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_states_become_those_of_rank_0(pool: RankPool, wrapper: str) -> None:
    first, *others = pool.run(3, _states, wrapper)
    assert all(other == first for other in others)
    assert list(first[2::3]) == [[0.2]] * len(OPTIMIZERS)
    assert all(
        bool(state) == (options != {"lr": 0.2} or name != "SGD")
        for (name, options), state in zip(OPTIMIZERS, first[1::3], strict=True)
    )
