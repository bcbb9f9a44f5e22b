"""`bagua.contrib.demo` against the formula in numpy, and its gradients of zero and of infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import Algorithm
from bagua.codecs import TopK
from tests.algorithms.quadratic import Quadratic, flat, start, target
from tests.contract.members import CONTRIB_ALGORITHMS

STEPS, LR, DECAY, CHUNK, KEEP = 12, 0.05, 0.9, 8, 2


def demo(**options: Any) -> Algorithm:
    return CONTRIB_ALGORITHMS["demo"](**options)


def basis(size: int) -> np.ndarray:
    """DCT-II, orthonormal, from the definition."""
    k, n = np.arange(size)[:, None], np.arange(size)[None]
    rows = np.cos(np.pi * k * (2 * n + 1) / (2 * size)) * np.sqrt(2 / size)
    rows[0] /= np.sqrt(2)
    return rows


def blocks(x: np.ndarray) -> list[np.ndarray]:
    return [x[at : at + CHUNK] for at in range(0, x.size, CHUNK)]


def sent_of(m: np.ndarray, everything: bool) -> np.ndarray:
    """C^-1 Q(C m): of each block the largest quarter of the frequencies, rounded up."""
    out = []
    for block in blocks(m):
        frequencies = basis(block.size) @ block
        kept = block.size if everything else -(-block.size * KEEP // CHUNK)
        frequencies[np.argsort(-np.abs(frequencies))[kept:]] = 0
        out.append(basis(block.size).T @ frequencies)
    return np.concatenate(out)


def oracle(ranks: int) -> np.ndarray:
    """In the bucket w (35 elements) comes before b (11), in x after it."""
    x, m = start(), np.zeros((ranks, start().size))
    for step in range(STEPS):
        sent = []
        for rank in range(ranks):
            m[rank] = DECAY * m[rank] + x - target(rank, step)
            sent.append(np.roll(sent_of(np.roll(m[rank], -11), everything=ranks == 1), 11))
            m[rank] -= sent[-1]
        x = x - LR * np.sign(np.mean(sent, 0))
    return x


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_formula(ranks: int) -> None:
    algorithm = demo(decay=DECAY, chunk=CHUNK, keep=KEEP, codec=TopK(KEEP / CHUNK, CHUNK))
    run = bagua.simulate(
        algorithm,
        ranks=ranks,
        model=Quadratic,
        loss=lambda module, rank, step: module(torch.tensor(target(rank, step), dtype=torch.float32)),
        steps=STEPS,
        optimizer=lambda params: torch.optim.SGD(params, lr=LR),
    )
    for model in run.models:
        assert np.abs(flat(model).detach().numpy() - oracle(ranks)).max() < 1e-5
    assert run.bytes_sent == STEPS * algorithm.bytes_per_rank(start().size, ranks)


def test_bytes() -> None:
    """11 for 64 elements: a header of 4, indices of 5 and values of 2."""
    assert demo().bytes_per_rank(64 * 1000, 2) == 11 * 1000
    assert demo().bytes_per_rank(64 * 1000, 4) == 3 * 11 * 1000


def follow_gradients(gradient: Any, steps: int, elements: int = 3) -> list[torch.Tensor]:
    """The gradients that the optimizer of rank 0 gets."""
    seen: list[torch.Tensor] = []

    class Watch(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(self.param_groups[0]["params"][0].grad.flatten().clone())
            return None

    bagua.simulate(
        demo(decay=0.0),
        ranks=2,
        model=lambda: nn.Linear(elements, 1, bias=False),
        loss=lambda module, rank, step: (module.weight * gradient(rank, step)).sum(),
        steps=steps,
        optimizer=lambda params: Watch(params, lr=1.0),
    )
    return seen[::2]


def test_a_weight_without_gradient_stays_where_it_is() -> None:
    for each in follow_gradients(lambda rank, step: 0.0, 3):
        assert not each.any()


def test_what_one_rank_sends_reaches_all_with_its_sign() -> None:
    for each in follow_gradients(lambda rank, step: -1.0 if rank == 1 else 0.0, 3):
        assert each.tolist() == [-1.0, -1.0, -1.0]


def test_an_overflow_of_one_rank_is_seen_once() -> None:
    seen = follow_gradients(lambda rank, step: float("inf") if (rank, step) == (1, 3) else 1.0, 6)
    assert [bool(each.isnan().all()) for each in seen] == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"decay": 1}, "decay"),
        ({"decay": True}, "decay"),
        ({"chunk": 1}, "chunk"),
        ({"chunk": 64.0}, "chunk"),
        ({"keep": 0}, "keep"),
        ({"chunk": 8, "keep": 9}, "keep"),
        ({"codec": "identity"}, "'identity'"),
        ({"codec": "bf16"}, "'bf16'"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        demo(**options)
