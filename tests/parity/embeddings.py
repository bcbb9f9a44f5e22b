"""Rows: sparse gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from tests.parity.case import FEW, Case
from tests.parity.feature import feature, says
from tests.parity.model import STEPS, distance, train, weights

SECTION = "Sparse gradients"
ROWS = 50


class Words(nn.Module):
    """Two tables, of which one may stay unused, and a dense layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4, sparse=sparse)
        self.bags = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=sparse)
        self.last = nn.Linear(4, 2)

    def forward(self, words: Tensor, bags: Tensor | None) -> Tensor:
        x = self.words(words).mean(0)
        return self.last(x if bags is None else x + self.bags(bags.view(1, -1))[0])


def backward(model: nn.Module, step: int, accumulate: bool = False) -> None:
    """One pass, or two of half the loss; rank 0 leaves the second table out now and then."""
    made = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    words, bags = torch.randint(ROWS, (2, 5), generator=made)
    loss = (model(words, None if dist.get_rank() == 0 and step % 2 else bags) - 1).square().sum()
    if accumulate:
        with bagua.no_sync(model):
            (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()
    else:
        loss.backward()


def run(case: Case, sparse: bool, accumulate: bool = False, paused: bool = False) -> tuple[dict[str, Tensor], int]:
    """Weights after some steps, and the bytes that the last one sent.

    Args:
        case: with which algorithm.
        sparse: what both tables are.
        accumulate: train on two halves of each loss.
        paused: average at the end only, where an asynchronous algorithm would average at any moment.
    """
    torch.manual_seed(0)
    model = Words(sparse)
    tables = [model.words.weight, model.bags.weight]
    # Its own optimizer where the algorithm brings one; SGD without momentum is the same with both kinds of gradients.
    own = case.optimizer(model.last.parameters()) if case.own_optimizer else None
    plain = torch.optim.SGD(tables if own else model.parameters(), lr=0.1)
    optimizers = [own, plain] if own else [plain]
    case.distribute(model, optimizers)
    if paused:
        bagua.pause(model)
    train(model, optimizers, range(STEPS), lambda step: backward(model, step, accumulate))
    if sparse:
        grads = [table.grad for table in tables if table.grad is not None]
        assert all(grad.is_sparse for grad in grads), "not exchanged as sparse"
        assert len(grads) == 2 or not case.shares_gradients, "rank 0 lacks what rank 1 looked up"
    sent = bagua.stats(model).last.bytes_sent
    case.check_agreement(model)
    return weights(model), sent


@feature(SECTION, "`nn.Embedding(sparse=True)`: exchanged as sparse, results equal to dense")
def sparse_embedding(case: Case) -> str | None:
    """The same weights; and only rows that were looked up travel, where gradients do."""
    if case.own_optimizer:
        model = Words(True)
        optimizer = case.optimizer(model.parameters())
        said = says(ValueError, "sparse", "'words.weight'", run=lambda: case.distribute(model, optimizer))
        assert case.name in said
        # Its dense twin would have to be in the algorithm's optimizer, so there is nothing to compare with.
        found, _ = run(case, True)
        halves, _ = run(case, True, accumulate=True)
        assert distance(found, halves) < 0.3 * distance(found, start())
        return "held by another optimizer, such as `SparseAdam`"
    if not case.synchronous:
        run(case, True)  # finite, and equal on all ranks once averaged; nothing else holds at any timing
    found, few = run(case, True, paused=not case.synchronous)
    want, many = run(case, False, paused=not case.synchronous)
    moved = distance(want, start())
    # The tables are exact where the exchange of the dense ones is lossy.
    rough = case.name == "power_sgd"  # which makes one matrix of the whole dense gradient
    assert distance(found, want) <= (2.0 if rough else max(case.slack, 1e-5) * 6) * moved
    if case.name == "gradient_allreduce":
        assert few < many, f"{few} bytes, dense {many}"
        halves, _ = run(case, True, accumulate=True)
        assert distance(found, halves) < 1e-5 * moved
    return None if case.shares_gradients else "gradients stay local; weights are exchanged whole"


def start() -> dict[str, Tensor]:
    """Weights before the first step."""
    torch.manual_seed(0)
    return weights(Words(True))


class Tied(nn.Module):
    """The table is the last layer's weight too, so its gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4, sparse=True)
        self.last = nn.Linear(4, ROWS, bias=False)
        self.last.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.words(words))


@feature(SECTION, "a sparse embedding tied to a dense layer: exchanged as dense", daily=FEW)
def tied_embedding(case: Case) -> None:
    """Whatever autograd makes of the two gradients."""
    model, optimizer = case.build(Tied)

    def passes(step: int) -> None:
        words = torch.randint(ROWS, (5,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(words).square().mean().backward()

    train(model, optimizer, range(STEPS), passes)
    case.check_agreement(model)
    assert distance(weights(model), case.start(Tied)) > 1e-3
