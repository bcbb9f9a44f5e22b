"""SparseLoCo equals a numpy oracle of the paper; anchors are the same on all ranks at all times."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import bagua
from bagua.algorithms import SparseLoCo, Warmup
from bagua.codecs import PackedTopK, TopK
from bagua.comm.team import Team
from tests.algorithms.quadratic import N, Quadratic, flat, start, target, targets
from tests.algorithms.test_diloco import LR, STEPS, TWO_BUCKETS, anchors_of, follow
from tests.codecs.test_packed_top_k import oracle as packed
from tests.rank_threads import run_teams

#: b and w make a bucket each, of 11 and 35 elements
PARTS = (slice(0, 11), slice(11, N))
EXACT = TopK(ratio=0.25, block=16)
PACKED = PackedTopK(ratio=0.25, block=16)


def encode(row: np.ndarray, codec: TopK | PackedTopK) -> np.ndarray:
    """decode(encode(row)) in fp32."""
    if isinstance(codec, PackedTopK):
        return packed(row.astype(np.float32), codec.ratio, codec.block)[1].astype(np.float64)
    kept = np.zeros_like(row)
    for first in range(0, len(row), codec.block or len(row)):
        part = row[first : first + (codec.block or len(row))]
        largest = np.argsort(-np.abs(part), kind="stable")[: int(np.ceil(codec.ratio * len(part)))]
        kept[first + largest] = part[largest]
    return kept


def oracle(size: int, algorithm: SparseLoCo, begin: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weights [steps, R, N] and anchors [steps, N]; a mean of all gradients before step `begin`."""
    codec = bagua.codecs.get(algorithm.codec)
    assert isinstance(codec, TopK | PackedTopK)
    x = np.tile(start(), (size, 1))
    anchor, residual = start(), np.zeros((size, N))
    began = x.copy()
    weights, anchors = [], []
    for t in range(1, STEPS + 1):
        gradients = x - targets(size, t - 1)
        x = x - LR * (gradients.mean(0) if t <= begin else gradients)
        if t <= begin:
            anchor, began = x[0].copy(), x.copy()
        elif t % algorithm.communication_interval == 0:
            residual = algorithm.decay * residual + began - x
            sent = residual.copy()
            if size > 1:
                for rank in range(size):
                    for part in PARTS:
                        sent[rank, part] = encode(residual[rank, part], codec)
            residual = residual - sent
            anchor = anchor - algorithm.outer_lr * sent.mean(0)
            x = anchor - algorithm.keep * residual
            began = x.copy()
        weights.append(x.copy())
        anchors.append(anchor.copy())
    return np.stack(weights), np.stack(anchors)


VARIANTS = [
    SparseLoCo(4, keep=0.0, codec=EXACT),
    SparseLoCo(4, codec=EXACT),
    SparseLoCo(1, decay=1.0, keep=1.0, codec=EXACT),
    SparseLoCo(3, decay=0.0, keep=0.0, codec=EXACT),
    SparseLoCo(5, outer_lr=0.7, decay=0.8, keep=0.25, codec=EXACT),
    SparseLoCo(4, keep=0.0, codec=PACKED),
    SparseLoCo(4, codec=PACKED),
]


def check(results: list, algorithm: SparseLoCo, begin: int = 0, tolerance: float = 3e-5) -> None:
    weights, anchors = oracle(len(results), algorithm, begin)
    for rank, (seen, kept, _) in enumerate(results):
        assert np.abs(seen - weights[:, rank]).max() < tolerance
        assert np.array_equal(kept, results[0][1]), "anchors differ"
        assert np.abs(kept - anchors[len(anchors) - len(kept) :]).max() < tolerance


@pytest.mark.parametrize(
    ("size", "algorithm"),
    [*((3, each) for each in VARIANTS), *((size, VARIANTS[at]) for size in (1, 2, 4, 8) for at in (1, 6))],
    ids=repr,
)
def test_is_the_papers(size: int, algorithm: SparseLoCo) -> None:
    check(run_teams(size, follow, algorithm), algorithm)


def test_replicas_meet_without_keep_and_stay_apart_with_it() -> None:
    for keep, equal in ((0.0, True), (0.5, False)):
        first, *others = run_teams(3, follow, SparseLoCo(4, keep=keep, codec=PACKED))
        for other in others:
            assert np.array_equal(first[0][3], other[0][3]) is equal, "after a round"
            assert not np.array_equal(first[0][2], other[0][2]), "before it"


def test_what_is_not_sent_is_sent_later() -> None:
    """Targets that do not change: with the residual the anchor gets there, without it most elements never move."""

    def distance(decay: float) -> float:
        algorithm = SparseLoCo(2, decay=decay, keep=0.0, codec=PackedTopK(ratio=0.05, block=46))
        seen = bagua.simulate(
            algorithm, ranks=2, model=Constant, loss=lambda m, r, s: m(), steps=120, optimizer=one_hundredth
        )
        return float(seen.models[0].x.detach().sub(Constant.target).norm())

    assert distance(0.95) < 0.7 * distance(0.0)


class Constant(torch.nn.Module):
    """The loss is the distance from a fixed target, whose elements differ in size."""

    target = torch.linspace(0.5, 1.0, 46)

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(46))

    def forward(self) -> torch.Tensor:
        return (self.x - self.target).square().sum() / 2


def one_hundredth(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


@pytest.mark.parametrize("begin", [1, 7, 8])
def test_after_a_warmup(begin: int) -> None:
    algorithm = VARIANTS[1]
    results = run_teams(3, follow, Warmup(begin, "gradient_allreduce", algorithm))
    check(results, algorithm, begin)


@pytest.mark.parametrize(("stop", "size"), [(3, 3), (8, 3), (9, 2), (8, 1)])
@pytest.mark.parametrize("algorithm", [VARIANTS[0], VARIANTS[6]], ids=repr)
def test_resume_is_bit_identical(size: int, stop: int, algorithm: SparseLoCo) -> None:
    plain = run_teams(size, partial(follow, look=False), algorithm)
    resumed = run_teams(size, partial(follow, look=False, stop=stop), algorithm)
    for one, other in zip(plain, resumed, strict=True):
        assert np.array_equal(one[0], other[0])


def test_the_residual_is_saved() -> None:
    (_, one), (_, other) = run_teams(2, partial(train, bad=0.0))
    assert np.abs(one).max() > 0 and not np.array_equal(one, other), "each rank has its own"


def train(team: Team, bad: float) -> tuple[bool, np.ndarray]:
    """Whether all weights are finite after two rounds, and the residual; `bad` is added to a gradient of rank 1."""
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    algorithm = SparseLoCo(1, codec=PACKED)
    bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=TWO_BUCKETS)
    for step in range(2):
        optimizer.zero_grad()
        wanted = torch.tensor(target(team.rank, step), dtype=torch.float32)
        wanted[20] += bad * team.rank
        model(wanted).backward()
        optimizer.step()
    finite, residual = bool(flat(model).isfinite().all()), anchors_of(bagua.state_dict(model), "residual")
    bagua.detach(model)
    return finite, residual


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_types(dtype: torch.dtype) -> None:
    """The outer state is fp32 at least; ranks agree on it."""
    algorithm = VARIANTS[0]
    results = run_teams(3, partial(follow, dtype=dtype), algorithm)
    assert all(np.array_equal(kept, results[0][1]) for _, kept, _ in results)
    if dtype is torch.float64:
        check(results, algorithm, tolerance=1e-5)  # what is sent is fp32
    else:
        rounded = torch.tensor(results[0][1]).to(dtype).double().numpy()
        assert not np.array_equal(rounded, results[0][1]), "anchors were kept in 16 bits"
        assert np.abs(results[0][0][-1] - oracle(3, algorithm)[0][-1, 0]).max() < 0.5


def test_bytes_per_step_are_what_available_says() -> None:
    for algorithm in (SparseLoCo(4), SparseLoCo(4, codec=PACKED), SparseLoCo(3, codec="int4")):
        want = algorithm.bytes_per_rank(N, 4) * STEPS
        for _, _, stats in run_teams(4, partial(follow, bucket_bytes=1 << 20), algorithm):
            assert stats.total.bytes_sent == want


def test_bits_of_the_default() -> None:
    """Of an element, to one other rank, in a round."""
    algorithm = SparseLoCo()
    assert 8 * algorithm.bytes_per_rank(1 << 22, 2) * algorithm.communication_interval / (1 << 22) < 0.22


def test_values_that_are_not_finite_do_not_stay_in_the_residual() -> None:
    """They reach the weights, where a guard sees them."""

    for finite, residual in run_teams(2, partial(train, bad=float("inf"))):
        assert not finite and np.isfinite(residual).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"communication_interval": 0}, ("communication_interval", "0")),
        ({"outer_lr": 0.0}, ("outer_lr", "0")),
        ({"outer_lr": float("nan")}, ("outer_lr", "nan")),
        ({"decay": 1.1}, ("decay", "1.1", "[0, 1]")),
        ({"decay": True}, ("decay", "True")),
        ({"keep": -0.1}, ("keep", "-0.1")),
        ({"codec": "identity"}, ("identity", "diloco")),
        ({"codec": "bf16"}, ("bf16", "diloco")),
        ({"codec": "int3"}, ("int3", "packed_top_k")),
    ],
)
def test_bad_options(options: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        bagua.algorithms.get("sparse_loco", **options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_exchange_gives_all_ranks_the_same_bits() -> None:
    exchange = replace(SparseLoCo(codec=PACKED).exchange, average=False)
    assert exchange.lossy and exchange.complete and not exchange.elementwise
    assert exchange.name == "all_gather[packed_top_k]"
    with pytest.raises(ValueError, match="identity"):
        bagua.exchanges.AllGather(bagua.codecs.get("identity"))
