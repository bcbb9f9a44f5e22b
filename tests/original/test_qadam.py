"""Before its warm-up ends, QAdam is Adam, bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from tests.original.training import flat, loss_of, make_model, train


def test_adam_in_the_warm_up() -> None:
    found: list[torch.Tensor] = []
    for kind, options in ((torch.optim.Adam, {}), (QAdamOptimizer, {"warmup_steps": 2000})):
        made: Any = kind
        model = make_model(13)
        train(model, made(model.parameters(), lr=0.001, weight_decay=0.1, **options), 0, range(300))
        found.append(flat(model))
        assert loss_of(model, 300, 0).isfinite()
    assert torch.equal(*found)
