"""Each algorithm equals a plain numpy oracle of its paper over 20 steps."""

from __future__ import annotations

import numpy as np
import pytest

from bagua import codecs, topologies
from bagua.algorithms import (
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
    Warmup,
)
from tests.algorithms.quadratic import N, follow, start, targets
from tests.codecs.test_minmax_uint8 import through_zero
from tests.rank_threads import run_teams

ALL_TO_ALL = [1, 2, 3, 4]  # with more ranks nothing else happens, in contrast to topologies
SIZES = [*ALL_TO_ALL, 8]
STEPS, LR = 10, 0.1


def mixing(topology: str, size: int, step: int) -> np.ndarray:
    return np.array(topologies.get(topology).matrix(size, step))


def gradient_allreduce(size: int) -> np.ndarray:
    x, seen = np.tile(start(), (size, 1)), []
    for step in range(STEPS):
        x = x - LR * (x - targets(size, step)).mean(0)
        seen.append(x)
    return np.stack(seen)


def decentralized(size: int, topology: str, interval: int) -> np.ndarray:
    """x_i <- (W x)_i - lr g(x_i); the gradient is taken at the weights before averaging."""
    x, seen = np.tile(start(), (size, 1)), []
    for step in range(STEPS):
        gradient = x - targets(size, step)
        if step % interval == 0:
            x = mixing(topology, size, step // interval) @ x
        x = x - LR * gradient
        seen.append(x)
    return np.stack(seen)


def local_sgd(size: int, interval: int) -> np.ndarray:
    x, seen = np.tile(start(), (size, 1)), []
    for step in range(STEPS):
        x = x - LR * (x - targets(size, step))
        if (step + 1) % interval == 0:
            x = np.tile(x.mean(0), (size, 1))
        seen.append(x)
    return np.stack(seen)


def quantise(row: np.ndarray) -> np.ndarray:
    """Min-max uint8 over one block, the definition."""
    low, high = through_zero(row.min(), row.max())
    if high == low:
        return row.copy()
    return low + np.clip(np.rint((row - low) * 255 / (high - low)), 0, 255) / 255 * (high - low)


def low_precision(size: int, interval: int) -> np.ndarray:
    """The original's formula with replicas L, R and W, but that two ranks give their one neighbour weight 1/2."""
    x = np.tile(start(), (size, 1))
    me, seen = x.copy(), []
    for step in range(STEPS):
        x = x - LR * (x - targets(size, step))
        if step % interval == 0:
            left, right = np.roll(me, 1, 0), np.roll(me, -1, 0)
            if size == 1:
                seen.append(x)
                continue
            share = 1 / 4 if size == 2 else 1 / 3
            d = x - me + share * (left - me) + share * (right - me)
            me = me + np.stack([quantise(row) for row in d])
            x = me.copy()
        seen.append(x)
    return np.stack(seen)


def worst(results: list, want: np.ndarray) -> float:
    return max(float(np.abs(seen - want[:, rank]).max()) for rank, (seen, _) in enumerate(results))


@pytest.mark.parametrize("size", ALL_TO_ALL)
def test_gradient_allreduce(size: int) -> None:
    assert worst(run_teams(size, follow, GradientAllReduce(), STEPS), gradient_allreduce(size)) < 1e-5


@pytest.mark.parametrize("size", ALL_TO_ALL)
@pytest.mark.parametrize("error_feedback", [False, True])
def test_bytegrad(size: int, error_feedback: bool) -> None:
    """Within the bound of two quantisations a step, summed with the contraction 1 - lr of the quadratic."""
    want = gradient_allreduce(size)
    results = run_teams(size, follow, ByteGrad(error_feedback=error_feedback), STEPS)
    span = 2 * max(np.abs(targets(size, step)).max() for step in range(STEPS)) + 2 * np.abs(want).max()
    per_step = 2 * 0.51 * span / 255 * (2 if error_feedback else 1)
    assert worst(results, want) <= per_step  # sum over steps of lr (1 - lr)^k per_step
    assert all(np.array_equal(seen, results[0][0]) for seen, _ in results)
    if size > 1:
        assert worst(results, want) > 1e-5, "nothing was quantised"


TOPOLOGIES: list[tuple[dict, str]] = [
    ({}, "complete"),
    ({"peer_selection_mode": "shift_one"}, "shift_one"),
    ({"topology": "ring"}, "ring"),
    ({"topology": "exponential"}, "exponential"),
]


@pytest.mark.parametrize(  # each topology meets each size, and each of both meets both intervals
    ("size", "options", "topology", "interval"),
    [(size, *TOPOLOGIES[j], [1, 3][(i + j) % 2]) for i, size in enumerate(SIZES) for j in range(len(TOPOLOGIES))],
)
def test_decentralized(size: int, options: dict, topology: str, interval: int) -> None:
    algorithm = Decentralized(communication_interval=interval, **options)
    assert worst(run_teams(size, follow, algorithm, STEPS), decentralized(size, topology, interval)) < 1e-5


@pytest.mark.parametrize("size", ALL_TO_ALL)
@pytest.mark.parametrize("interval", [1, 4])
def test_local_sgd(size: int, interval: int) -> None:
    algorithm = LocalSGD(communication_interval=interval)
    assert worst(run_teams(size, follow, algorithm, STEPS), local_sgd(size, interval)) < 1e-5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("interval", [1, 3])
def test_low_precision_decentralized(size: int, interval: int) -> None:
    """The oracle rounds in fp64: where a value lies at the edge between two codes, they may be a code apart."""
    algorithm = LowPrecisionDecentralized(communication_interval=interval)
    want = low_precision(size, interval)
    results = run_teams(size, follow, algorithm, STEPS)
    apart = np.concatenate([np.abs(seen - want[:, rank]).ravel() for rank, (seen, _) in enumerate(results)])
    assert apart.max() < 0.005  # a code of the first differences, which are the largest
    assert np.mean(apart > 1e-5) < 0.5


def test_consensus_is_bounded_by_drift_over_spectral_gap() -> None:
    """For the rate itself see tests/exchanges/test_contraction.py."""
    size = 8
    matrix = mixing("ring", size, 0)
    rate = np.sort(np.abs(np.linalg.eigvalsh(matrix)))[-2]
    want = decentralized(size, "ring", 1)
    spread = [np.linalg.norm(x - x.mean(0)) for x in want]
    assert 0 < rate < 1
    noise = LR * max(np.linalg.norm(targets(size, step) - targets(size, step).mean(0)) for step in range(STEPS))
    assert max(spread) <= noise / (1 - rate)
    results = run_teams(size, follow, Decentralized(topology="ring"), STEPS)
    ours = np.stack([seen for seen, _ in results], 1)
    assert max(np.linalg.norm(x - x.mean(0)) for x in ours) <= noise / (1 - rate) + 1e-4


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2]])
@pytest.mark.parametrize(
    "algorithm",
    [GradientAllReduce(hierarchical=True), LocalSGD(hierarchical=True, communication_interval=1), Decentralized()],
)
def test_hierarchical_equals_flat_where_the_exchange_is_complete(nodes: list[int], algorithm) -> None:
    want = {
        "gradient_allreduce": gradient_allreduce,
        "local_sgd": lambda size: local_sgd(size, 1),
        "decentralized": lambda size: decentralized(size, "complete", 1),
    }[algorithm.name](len(nodes))
    assert worst(run_teams(len(nodes), follow, algorithm, STEPS, nodes=nodes), want) < 1e-5


@pytest.mark.parametrize(("codec", "expected"), [("identity", False), ("bf16", False), ("int4", True), ("sign", True)])
def test_codecs_that_cannot_be_summed_are_hierarchical_by_default(codec: str, expected: bool) -> None:
    """Ranks of a node would send as often over its link, instead of once."""
    algorithm = GradientAllReduce(codec=codec)
    for nodes, hierarchical in ((((0, 1), (2, 3)), expected), (((0,), (1,)), False), (((0, 1),), False)):
        made, _ = algorithm.for_nodes(nodes)
        assert isinstance(made, GradientAllReduce)
        assert made.hierarchical is hierarchical and made.exchange.hierarchical is hierarchical
    explicit, _ = GradientAllReduce(hierarchical=False, codec=codec).for_nodes(((0, 1), (2, 3)))
    assert isinstance(explicit, GradientAllReduce) and explicit.hierarchical is False


def test_hierarchical_gossip_among_nodes() -> None:
    """Nodes of two and one: within a node all equal, between nodes the low-precision ring."""
    results = run_teams(3, follow, LowPrecisionDecentralized(hierarchical=True), STEPS, nodes=[0, 0, 1])
    assert np.array_equal(results[0][0], results[1][0])
    assert not np.array_equal(results[0][0], results[2][0])
    assert np.abs(results[0][0] - results[2][0]).max() < 2.0


@pytest.mark.parametrize(
    ("first", "then"),
    [("gradient_allreduce", "local_sgd"), ("gradient_allreduce", "bytegrad"), ("local_sgd", "gradient_allreduce")],
)
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_warmup_hands_over(first: str, then: str, steps: int) -> None:
    size = 3
    parts = [LocalSGD(communication_interval=8) if name == "local_sgd" else name for name in (first, then)]
    results = run_teams(size, follow, Warmup(steps, *parts), STEPS)
    x = np.tile(start(), (size, 1))
    for step in range(STEPS):
        name = first if step < steps else then
        gradient = x - targets(size, step)
        x = x - LR * (gradient if name == "local_sgd" else gradient.mean(0))
        if name == "local_sgd" and (step + 1) % 8 == 0:
            x = np.tile(x.mean(0), (size, 1))
        if step + 1 == steps and first == "local_sgd":
            x = np.tile(x.mean(0), (size, 1))  # what takes over starts from equal replicas
        tolerance = 0.1 if "bytegrad" in (first, then) else 1e-5
        for rank, (seen, _) in enumerate(results):
            assert np.abs(seen[step] - x[rank]).max() < tolerance, (rank, step, name)


@pytest.mark.parametrize("codec", ["int4", "sign", "top_k"])
@pytest.mark.parametrize("size", [2, 3])
def test_error_feedback_makes_coarse_codecs_train(codec: str, size: int) -> None:
    """The mean over the last steps follows the exact run; without feedback sign and top-k stay away from it."""
    options = {"codec": codec if codec != "top_k" else codecs.TopK(0.25), "error_feedback": True}
    want = gradient_allreduce(size)[-1, 0]
    results = run_teams(size, follow, GradientAllReduce(**options), STEPS)
    assert all(np.array_equal(seen, results[0][0]) for seen, _ in results)
    start_distance = np.linalg.norm(start() - want)
    assert np.linalg.norm(results[0][0][-1] - want) < 0.35 * start_distance


@pytest.mark.parametrize("algorithm", [ByteGrad, GradientAllReduce])
def test_error_feedback_follows_the_codec_unless_told_otherwise(algorithm) -> None:
    of_codec = {"minmax_uint8": False, "int4": True, "sign": True, "top_k": True}
    for codec, wanted in {**of_codec, "top_k:ratio=0.3": True, "top_k:ratio=1": False}.items():
        assert algorithm(codec=codec).exchange == algorithm(codec=codec, error_feedback=wanted).exchange
        assert algorithm(codec=codec).exchange != algorithm(codec=codec, error_feedback=not wanted).exchange
    assert algorithm(codec="bf16").exchange == algorithm(codec="bf16", error_feedback=False).exchange


@pytest.mark.parametrize(("codec", "bits"), [("bf16", 8), ("fp16", 11)])
def test_half_precision_all_reduce(codec: str, bits: int) -> None:
    want = gradient_allreduce(3)
    results = run_teams(3, follow, GradientAllReduce(codec=codec), STEPS)
    top = 2 * max(np.abs(targets(3, step)).max() for step in range(STEPS)) + np.abs(want).max()
    assert 0 < worst(results, want) <= 3 * top * 2.0**-bits


def test_bytes_per_step_are_what_available_says() -> None:
    for algorithm in (Decentralized(peer_selection_mode="shift_one"), LowPrecisionDecentralized(), LocalSGD(8)):
        for _, stats in run_teams(4, follow, algorithm, 16):
            step = algorithm.bytes_per_rank(N, 4)
            in_flight = step if isinstance(algorithm, LowPrecisionDecentralized) else 0  # the last one may be
            assert -16 <= 16 * step - stats.total.bytes_sent <= in_flight + 16


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Decentralized(peer_selection_mode="some"), ("peer_selection_mode", "shift_one", "'some'")),
        (lambda: Decentralized(communication_interval=0), ("communication_interval", "0")),
        (lambda: Decentralized(topology="ring", peer_selection_mode="shift_one"), ("topology", "peer_selection_mode")),
        (lambda: Decentralized(codec="minmax_uint8"), ("minmax_uint8", "complete")),
        (lambda: Decentralized(codec="minmax_uint8", topology="exponential"), ("minmax_uint8", "exponential")),
        (lambda: LowPrecisionDecentralized(topology="shift_one"), ("shift_one", "minmax_uint8")),
        (lambda: LocalSGD(codec="sign"), ("sign", "diloco", "error_feedback")),
        (lambda: LocalSGD(codec="top_k"), ("top_k", "eden")),
        (lambda: LocalSGD(codec="top_k:ratio=0.2"), ("top_k", "error_feedback")),
        (lambda: DiLoCo(codec="top_k"), ("top_k", "error_feedback")),
        (lambda: DiLoCo(codec="packed_top_k:ratio=0.9"), ("packed_top_k", "error_feedback")),
        (lambda: LocalSGD(communication_interval=2.5), ("communication_interval", "2.5")),  # pyright: ignore
        (lambda: Warmup(-1, "bytegrad", "bytegrad"), ("steps", "-1")),
        (lambda: Warmup(3, "bytegrad", "nothing"), ("'nothing'",)),
    ],
)
def test_bad_options(make, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)
