"""`torch.compile` of an optimizer's step: the compiler sees the optimizer's arithmetic, and nothing of Bagua's."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from tests.engine.training import batch, distributed, equal, values
from tests.rank_pool import RankPool

STEPS = 5


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def compiled_and_eager(algorithm: str) -> tuple[list[dict[str, Tensor]], list[str], list[str], list[str]]:
    """Weights of both ways, what the compiler said aloud, why it broke graphs, and where it was in each graph."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    said: list[str] = []
    seen: list[str] = []

    class Listens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(" ".join(str(node.stack_trace) for node in graph.graph.nodes))
        return graph.forward

    found = []
    listens = Listens(logging.WARNING)
    logging.getLogger("torch._dynamo").addHandler(listens)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for compiles in (True, False):
            model, optimizer = distributed(small, algorithm, seed_by_rank=False)
            step: Any = torch.compile(optimizer.step, backend=backend) if compiles else optimizer.step
            for number in range(STEPS):
                optimizer.zero_grad()
                model(batch(torch.distributed.get_rank(), number)).square().mean().backward()
                step()
            found.append(values(model))
            bagua.detach(model)
    logging.getLogger("torch._dynamo").removeHandler(listens)
    breaks = list(counters["graph_break"])
    torch._dynamo.reset()
    return found, said + [str(each.message) for each in warned if "ynamo" in str(each.message)], breaks, seen


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized", "local_sgd"])
def test_the_compiler_does_not_trace_what_is_exchanged(pool: RankPool, algorithm: str) -> None:
    """It would at every step anew, with warnings by the dozen, and ranks would not compile in the same steps."""
    for (compiled, eager), said, breaks, seen in pool.run(2, compiled_and_eager, algorithm):
        assert equal(compiled, eager)
        assert seen, "nothing was compiled"
        assert not any(part in each for each in [*seen, *said] for part in ("bagua/engine", "bagua/algorithms"))
        assert not any("recompile" in each or "does not know" in each for each in said), said
        assert all("Bagua exchanges" in each for each in breaks) and len(breaks) <= 2, breaks
