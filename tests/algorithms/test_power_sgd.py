"""PowerSGD equals a float64 oracle of the paper, loses nothing over time, and stays on its feet."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import bagua
import bagua.engine.api
from bagua import exchanges
from bagua.algorithms import PowerSGD, Warmup
from bagua.codecs import Bf16
from bagua.comm.groups import Group, Groups
from bagua.comm.team import Team
from bagua.contrib.dion import Orthonormalised
from bagua.engine.lanes.lane import InlineLane
from bagua.engine.lanes.selection import make_lane
from bagua.exchanges import Hierarchical
from bagua.exchanges.low_rank import LowRank, inverse_size
from tests.algorithms.quadratic import N, follow, start, targets
from tests.low_rank_gradients import degenerate, normal
from tests.rank_threads import run_teams, run_threads

SIZES = [1, 2, 3, 4]
STEPS, LR = 10, 0.1
SHAPES = ((12, 9), (1, 13), (9, 16), (12, 9), (2, 3), (1, 1), (16, 9))  # (2, 3) is too small, (1, n) are vectors
SIZES_OF_PARTS = [n * m for n, m in SHAPES]
NUMEL, ENDS = sum(SIZES_OF_PARTS), np.cumsum(SIZES_OF_PARTS)[:-1]


def gradient(rank: int, step: int, numel: int = NUMEL) -> np.ndarray:
    return normal(rank, step, numel)


class Oracle:
    """Algorithms 1 and 2 of the paper in float64, matrix by matrix, with the first Q of the exchange."""

    def __init__(self, exchange: exchanges.PowerSGD, size: int, dtype: torch.dtype = torch.float32) -> None:
        self.error_feedback, self.layout = exchange.error_feedback, exchange._layout
        two = Groups(Group(None, 0, 2, (0, 1)), ((0, 1),))
        numel = sum(n * m for n, m in exchange.shapes)
        right = exchange.init(torch.zeros(numel, dtype=dtype), two)["right"].double().numpy()
        self.q = [right[each.right : each.right + each.m * each.r].reshape(each.r, each.m).T for each in self.matrices]
        self.error = np.zeros((size, numel))

    @property
    def matrices(self):
        return self.layout.matrices

    def mix(self, x_RN: np.ndarray) -> np.ndarray:
        out = x_RN.mean(0)
        for k, each in enumerate(self.matrices):
            place = slice(each.start, each.start + each.n * each.m)
            delta = (x_RN + self.error)[:, place].reshape(-1, each.n, each.m)
            p = gram_schmidt((delta @ self.q[k]).mean(0))
            own = [matrix.T @ p for matrix in delta]
            self.q[k] = np.mean(own, 0)
            out[place] = (p @ self.q[k].T).reshape(-1)
            if self.error_feedback:
                for rank, q in enumerate(own):
                    self.error[rank, place] = (delta[rank] - p @ q.T).reshape(-1)
        return out


def gram_schmidt(p: np.ndarray) -> np.ndarray:
    p = p.copy()
    for i in range(p.shape[1]):
        p[:, i] /= np.linalg.norm(p[:, i])
        p[:, i + 1 :] -= np.outer(p[:, i], p[:, i] @ p[:, i + 1 :])
    return p


def drive(
    groups: Groups, exchange, steps: int, dtype=torch.float32, give=gradient, device="cpu"
) -> tuple[list, dict, int]:
    """Outputs of each step, the state at the end, and bytes sent."""
    state = exchange.init(torch.zeros(NUMEL, dtype=dtype, device=device), groups)
    seen = []
    for step in range(steps):
        x = torch.tensor(give(groups.rank, step)).to(device, dtype)
        exchange.run(x, state, groups, step)
        seen.append(x)
    return seen, state, sum(meter.sent for meter in groups.meters)


@pytest.mark.parametrize(  # each rank meets each size, and each of both meets error feedback on and off
    ("size", "rank", "error_feedback"),
    [(size, rank, (i + rank) % 2 == 0) for i, size in enumerate(SIZES) for rank in (1, 2, 3)],
)
def test_exchange_is_the_papers(size: int, error_feedback: bool, rank: int) -> None:
    """In fp64, because power iteration among close singular values amplifies rounding over the steps."""
    exchange = exchanges.PowerSGD(SHAPES, rank, error_feedback, min_compression=1.0)
    results = run_threads(size, drive, exchange, STEPS, torch.float64)
    if size == 1:
        assert all(np.array_equal(x.numpy(), gradient(0, k)) for k, x in enumerate(results[0][0]))
        return
    oracle = Oracle(exchange, size, torch.float64)
    assert len(oracle.matrices) == (5 if rank == 1 else 4)
    for step in range(STEPS):
        want = oracle.mix(np.stack([gradient(r, step) for r in range(size)]))
        for seen, _, _ in results:
            assert torch.equal(seen[step], results[0][0][step]), "all ranks end with the same bits"
            assert np.abs(seen[step].numpy() - want).max() < 1e-10, step
    if error_feedback:
        for r, (_, state, _) in enumerate(results):
            ours = state["error"].numpy()
            theirs = np.concatenate([oracle.error[r, m.start : m.start + m.n * m.m] for m in oracle.matrices])
            assert np.abs(ours - theirs).max() < 1e-9


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
def test_algorithm_is_the_papers(size: int, bucket_bytes: int) -> None:
    algorithm = PowerSGD(rank=1)
    results = run_teams(size, partial(follow, bucket_bytes=bucket_bytes), algorithm, STEPS)
    oracle = Oracle(exchanges.PowerSGD(((1, 11), (7, 5)), 1), size)
    x = start()
    for step in range(STEPS):
        gradients = x - targets(size, step)
        x = x - LR * (oracle.mix(gradients) if size > 1 else gradients[0])
        for seen, _ in results:
            assert np.abs(seen[step] - x).max() < 1e-4
    assert all(np.array_equal(seen, results[0][0]) for seen, _ in results)
    assert results[0][1].num_buckets == (2 if bucket_bytes == 8 else 1)


def test_ranks_by_shape_are_the_papers_with_those_ranks() -> None:
    """The shorter side decides, both ways round; a matrix that is too small for its rank is averaged exactly."""
    shapes = ((12, 9), (100, 64), (1, 13), (64, 100), (7, 7))
    exchange = exchanges.PowerSGD(shapes, error_feedback=True, min_compression=1.0)
    assert [exchange.rank_of(n, m) for n, m in shapes] == [3, 8, 0, 8, 3]
    assert exchanges.PowerSGD(shapes, min_compression=2.0).rank_of(7, 7) == 0
    numel, size = sum(n * m for n, m in shapes), 3

    def drive_these(groups: Groups) -> list[np.ndarray]:
        state, seen = exchange.init(torch.zeros(numel, dtype=torch.float64), groups), []
        for step in range(STEPS):
            x = torch.tensor(gradient(groups.rank, step, numel))
            exchange.run(x, state, groups, step)
            seen.append(x.numpy())
        return seen

    oracle, results = Oracle(exchange, size, torch.float64), run_threads(size, drive_these)
    for step in range(STEPS):
        want = oracle.mix(np.stack([gradient(r, step, numel) for r in range(size)]))
        assert all(np.abs(seen[step] - want).max() < 1e-10 for seen in results), step


@pytest.mark.parametrize("size_of_gradients", [1.0, 1e-8])
def test_factors_in_bf16(size_of_gradients: float) -> None:
    """Half the bytes. Columns of the left factor are as large as the square of the gradient: 1e-16."""

    def give(rank: int, step: int) -> np.ndarray:
        return gradient(rank, 0) * size_of_gradients  # the same again: the oracle's Q stays close

    size, exact = 3, exchanges.PowerSGD(SHAPES, 2, min_compression=1.0)
    exchange = exchanges.PowerSGD(SHAPES, 2, min_compression=1.0, codec=Bf16())
    oracle, results = Oracle(exchange, size), run_threads(size, partial(drive, give=give), exchange, 3)
    for step in range(3):
        want = oracle.mix(np.stack([give(r, step) for r in range(size)]))
        off = [np.abs(seen[step].numpy() - want).max() / np.abs(want).max() for seen, _, _ in results]
        assert 1e-6 < off[0] < 5e-2, "rounded, and by no more"
        assert all(torch.equal(seen[step], results[0][0][step]) for seen, _, _ in results), "all ranks: the same bits"
    for _, _, sent in results:
        assert abs(sent / 3 - exact.bytes_per_rank(NUMEL, size) / 2) <= 24
    assert exchange.bytes_per_rank(NUMEL, size) == pytest.approx(exact.bytes_per_rank(NUMEL, size) / 2, rel=0.01)


@pytest.mark.parametrize("rank", [16, 40])
@pytest.mark.parametrize("size", [2, 3])
def test_full_rank_is_the_exact_mean(size: int, rank: int) -> None:
    forced = exchanges.PowerSGD(SHAPES, rank, min_compression=0.01)
    assert len(forced._layout.matrices) == 5
    for exchange in (forced, exchanges.PowerSGD(SHAPES, rank)):
        for seen, _, _ in run_threads(size, drive, exchange, 5):
            for step, x in enumerate(seen):
                want = np.mean([gradient(r, step) for r in range(size)], 0)
                assert np.abs(x.numpy() - want).max() < 2e-5
    assert forced.lossy and not exchanges.PowerSGD(SHAPES, rank).lossy, "full rank saves nothing"


def test_error_feedback_loses_nothing_over_time() -> None:
    """What came out in total follows what went in, and no rank's own error adds up, though ranks differ for ever."""
    size, steps = 3, 100

    def give(rank: int, step: int) -> np.ndarray:
        return gradient(rank, 0) + gradient(rank, step)

    want = sum(np.mean([give(r, step) for r in range(size)], 0) for step in range(steps))
    once = 3.0

    def total(error_feedback: bool) -> np.ndarray:
        exchange = exchanges.PowerSGD(SHAPES, 2, error_feedback, min_compression=1.0)
        seen, state, _ = run_threads(size, partial(drive, give=give), exchange, steps)[0]
        if error_feedback:
            # Up to 17 times on some CPUs, whose matrix products round otherwise; over 70 if it added up.
            assert state["error"].abs().max() < 40 * once, "a rank's own error stays bounded"
        return torch.stack(seen).double().sum(0).numpy()

    assert np.abs(total(True) - want).max() < 5 * once
    assert np.abs(total(False) - want).max() > 10 * once, "the test would pass without error feedback"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("error_feedback", [True, False])
def test_payload_types(dtype: torch.dtype, error_feedback: bool) -> None:
    """Computed in fp32 or better: only the gradients and the results are rounded."""
    size = 3
    exchange = exchanges.PowerSGD(SHAPES, 2, error_feedback, min_compression=1.0)
    epsilon = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    oracle = Oracle(exchange, size, dtype)
    for_rank = [[torch.tensor(gradient(r, k)).to(dtype).double().numpy() for k in range(5)] for r in range(size)]
    results = run_threads(size, drive, exchange, 5, dtype)
    for step in range(5):
        want = oracle.mix(np.stack([for_rank[r][step] for r in range(size)]))
        for seen, _, _ in results:
            assert seen[step].dtype is dtype
            assert np.abs(seen[step].double().numpy() - want).max() <= epsilon * np.abs(want).max() + 1e-11 * (
                1 if dtype is torch.float64 else 1e6
            )


def with_one_element(value: float, rank: int, step: int) -> np.ndarray:
    """Gradients of which rank 0's in step 2 has this element."""
    x = gradient(rank, step)
    if step == 2 and rank == 0:
        x[5] = value
    return x


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_overflow_is_seen_and_forgotten(error_feedback: bool, bad: float, device: torch.device) -> None:
    exchange = exchanges.PowerSGD(SHAPES, 2, error_feedback, min_compression=1.0)
    give = partial(with_one_element, bad)
    results = run_threads(2, partial(drive, give=give, device=device), exchange, 5, staged=device.type == "cuda")
    for seen, state, _ in results:
        assert [bool(x.isfinite().all()) for x in seen] == [True, True, False, True, True]
        assert all(tensor.isfinite().all() for tensor in state.values())


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("large", [1e30, 1e38, 3e38])
def test_a_large_gradient_is_forgotten(error_feedback: bool, large: float, device: torch.device) -> None:
    """Its square overflows, but neither it nor the products with the first Q do."""
    exchange = exchanges.PowerSGD(SHAPES, 2, error_feedback, min_compression=1.0)
    give = partial(with_one_element, large)
    results = run_threads(2, partial(drive, give=give, device=device), exchange, 6, staged=device.type == "cuda")
    for seen, state, _ in results:
        assert all(x.isfinite().all() for x in seen)
        assert all(tensor.isfinite().all() for tensor in state.values())
        assert all(float(x.abs().max()) < 10 for x in seen[4:])


@pytest.mark.parametrize("large", [2.0**40, 2.0**116])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_gradients_are_exchanged_as_small_ones_are(
    large: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Factors of powers of two change no bits, unless a number becomes subnormal."""
    exchange = exchanges.PowerSGD(SHAPES, 2, error_feedback=True, min_compression=1.0)

    def times(rank: int, step: int) -> np.ndarray:
        return large * gradient(rank, step)

    staged = device.type == "cuda"
    small = run_threads(2, partial(drive, device=device), exchange, 5, dtype, staged=staged)[0][0]
    much = run_threads(2, partial(drive, give=times, device=device), exchange, 5, dtype, staged=staged)[0][0]
    for a, b in zip(small, much, strict=True):
        assert torch.equal(a * large, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_sizes_are_powers_of_two(dtype: torch.dtype, device: torch.device) -> None:
    limits = torch.finfo(dtype)
    sizes = [limits.tiny, 1e-30, 0.5, 0.75, 1.0, 3.0, 1e30]
    scales = inverse_size(torch.tensor(sizes, dtype=dtype, device=device))
    for size, scale in zip(sizes, scales.tolist(), strict=True):
        assert math.frexp(scale)[0] == 0.5 and 0.5 <= size * scale < 1
    odd = torch.tensor([0.0, math.inf, math.nan, limits.tiny / 1024, limits.max], dtype=dtype, device=device)
    assert inverse_size(odd).tolist() == [1.0, 1.0, 1.0, 1 / limits.tiny, limits.tiny]


def test_zero_and_rank_deficient_gradients_leave_no_dead_columns() -> None:
    """A zero gradient wipes Q out; the next one must get through all the same."""

    def give(rank: int, step: int) -> np.ndarray:
        found = degenerate(SHAPES, step)
        return gradient(rank, 4) if found is None else found

    exchange = exchanges.PowerSGD(SHAPES, 3, min_compression=1.0)
    seen, state, _ = run_threads(2, partial(drive, give=give), exchange, 40)[0]
    assert all(not x.any() for x in seen[:2])
    for k in (2, 3):
        total = torch.stack(seen[2 : k + 1]).sum(0).numpy()
        if k == 3:
            assert np.abs(total - 2 * give(0, 3)).max() < 1e-4, "rank one is exact once Q has seen it"
    assert all(torch.linalg.matrix_rank(q) == q.shape[0] for q in rights(exchange, state))
    mean = np.mean([gradient(r, 4) for r in range(2)], 0)
    late = torch.stack(seen[20:]).mean(0).numpy()
    assert np.abs(late - mean).max() < 0.5 * np.abs(mean).max()


ZERO_ROWS = [0, 2, 7, 11]


@pytest.mark.parametrize("used", [8, 2], ids=["full rank", "fewer rows than the rank"])
@pytest.mark.parametrize(
    "exchange",
    [
        *(exchanges.PowerSGD(SHAPES, 3, feedback, min_compression=1.0) for feedback in (True, False)),
        exchanges.PowerSGD(SHAPES, 3, min_compression=1.0, codec=Bf16()),
        Orthonormalised(SHAPES, (1.0,) * len(SHAPES), rank_fraction=0.4),
    ],
    ids=["feedback", "no feedback", "bf16", "dion"],
)
def test_rows_that_are_zero_on_all_ranks_stay_zero(exchange: LowRank, used: int, device: torch.device) -> None:
    """The first ones are pivots of the QR decomposition, which leaves rounding there."""

    def give(rank: int, step: int) -> np.ndarray:
        parts = [part.reshape(shape) for part, shape in zip(np.split(gradient(rank, step), ENDS), SHAPES, strict=True)]
        parts[0][ZERO_ROWS] = parts[3][ZERO_ROWS] = 0
        parts[3][used:] = 0
        return np.concatenate([part.reshape(-1) for part in parts])

    results = run_threads(2, partial(drive, give=give, device=device), exchange, 5, staged=device.type == "cuda")
    for seen, _, _ in results:
        for x in seen:
            first, second = (x.split(SIZES_OF_PARTS)[index].view(12, 9) for index in (0, 3))
            assert not first[ZERO_ROWS].any() and not second[ZERO_ROWS].any() and not second[used:].any()
            assert first[1].any() and second[1].any()


def rights(exchange: exchanges.PowerSGD, state: dict) -> list[torch.Tensor]:
    return [state["right"][m.right : m.right + m.m * m.r].view(m.r, m.m) for m in exchange._layout.matrices]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_bytes_sent_are_what_is_said(size: int) -> None:
    for exchange in (exchanges.PowerSGD(SHAPES, 2, min_compression=1.0), exchanges.PowerSGD(((1, NUMEL),))):
        for _, _, sent in run_threads(size, drive, exchange, 3):
            assert abs(sent - 3 * exchange.bytes_per_rank(NUMEL, size)) <= 6  # parts of a byte, twice a step
    with pytest.raises(ValueError, match="7 elements"):
        exchange.bytes_per_rank(7, size)


@pytest.mark.parametrize("nodes", [[0, 0, 1], [0, 0, 0, 1], [0, 1, 0, 1], [0, 0]])
def test_hierarchical_is_the_same_mean(nodes: list[int]) -> None:
    """Without errors of single ranks to tell them apart, low rank of sums is low rank of the mean."""
    size = len(nodes)
    exchange = exchanges.PowerSGD(SHAPES, 2, min_compression=1.0)
    results = run_threads(size, drive, Hierarchical(exchange), 10, nodes=nodes, hierarchical=True)
    oracle = Oracle(exchange, size)
    for step in range(10):
        gradients = np.stack([gradient(r, step) for r in range(size)])
        want = oracle.mix(gradients) if len(set(nodes)) > 1 else gradients.mean(0)
        for seen, _, _ in results:
            assert torch.equal(seen[step], results[0][0][step])
            assert np.abs(seen[step].numpy() - want).max() < 2e-4


def test_hierarchical_by_default_where_there_is_a_hierarchy() -> None:
    seen = run_teams(3, follow, PowerSGD(rank=1), 3, nodes=[0, 0, 1])
    assert np.array_equal(seen[0][0], seen[2][0])
    assert PowerSGD().for_nodes(((0, 1), (2,)))[0].hierarchical_groups
    assert not PowerSGD().for_nodes(((0,), (1,)))[0].hierarchical_groups


class Deep(nn.Module):
    """Many buckets: linear, convolution in both memory formats, a transposed weight, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(8)])
        self.conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(16, 24).t())
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        image = (x @ self.turned.t())[:, :16].view(-1, 4, 2, 2).repeat(1, 1, 2, 2)
        return (self.conv(image) * self.scale).square().mean() + (x - 1).square().mean()


def train(team: Team, algorithm, steps: int, bucket_bytes: int, stop: int = 0):
    """Weights after `steps` steps, statistics; with `stop`: saved there and gone on with in a new module."""

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, generator = Deep(), torch.Generator().manual_seed(3)  # ranks are threads: not the global generator
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(0.2 * torch.randn(param.shape, generator=generator))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=bucket_bytes)
        return model, optimizer

    model, optimizer = fresh()
    for step in range(steps):
        if stop and step == stop:
            saved = model.state_dict(), optimizer.state_dict(), bagua.state_dict(model)
            other, optimizer = fresh()
            other.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            bagua.load_state_dict(other, saved[2])
            bagua.detach(model)
            model = other
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * team.rank + step)
        model(torch.randn(4, 16, generator=generator)).backward()
        optimizer.step()
    stats = bagua.stats(model)
    bagua.detach(model)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), stats


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bucket_bytes", [4, 2000])
def test_several_buckets_in_flight(size: int, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass launches them all at once; one after the other gives the same bits."""
    threaded = run_teams(size, train, PowerSGD(rank=2), 3, bucket_bytes)
    monkeypatch.setattr(bagua.engine.api, "make_lane", lambda groups, device: InlineLane(groups))
    inline = run_teams(size, train, PowerSGD(rank=2), 3, bucket_bytes)
    monkeypatch.setattr(bagua.engine.api, "make_lane", make_lane)
    for (weights, stats), (others, _) in zip(threaded, inline, strict=True):
        assert torch.equal(weights, others) and torch.equal(weights, threaded[0][0])
        assert stats.num_buckets == (20 if bucket_bytes == 4 else 5)
        assert stats.total.launches == 3 * stats.num_buckets


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("error_feedback", [True, False])
def test_resume_is_bit_identical(size: int, error_feedback: bool) -> None:
    algorithm = PowerSGD(rank=2, error_feedback=error_feedback)
    whole = run_teams(size, train, algorithm, 8, 2000)
    resumed = run_teams(size, train, algorithm, 8, 2000, 3)
    for (weights, _), (others, _) in zip(whole, resumed, strict=True):
        assert torch.equal(weights, others)


def test_matrices_as_they_lie_in_memory() -> None:
    from bagua.exchanges.low_rank import matrix_shape

    image = torch.empty(8, 4, 3, 3)
    for param, shape in [
        (torch.empty(5, 7), (5, 7)),
        (torch.empty(5, 7).t(), (5, 7)),
        (image, (8, 36)),
        (image.to(memory_format=torch.channels_last), (8, 36)),
        (torch.empty(1, 6, 9), (6, 9)),
        (torch.empty(7), (1, 7)),
        (torch.empty(()), (1, 1)),
        (torch.empty(0, 4), (0, 4)),
        (torch.empty(1, 4, 1), (1, 4)),
    ]:
        assert matrix_shape(param) == shape


def test_warmup_begins_exactly() -> None:
    size, begin = 3, 5
    results = run_teams(size, follow, Warmup(begin, "gradient_allreduce", PowerSGD(rank=1)), STEPS)
    oracle = Oracle(exchanges.PowerSGD(((1, 11), (7, 5)), 1), size)
    x = start()
    for step in range(STEPS):
        gradients = x - targets(size, step)
        x = x - LR * (gradients.mean(0) if step < begin else oracle.mix(gradients))
        for seen, _ in results:
            assert np.abs(seen[step] - x).max() < 1e-4


def test_the_typical_figure() -> None:
    assert PowerSGD(rank=4).bytes_per_rank(1 << 22, 4) == 6 * (1 << 22) * 8 / 1024
    assert PowerSGD(rank=1024).bytes_per_rank(1 << 20, 4) == 6 * (1 << 20), "nothing to save"
    _, stats = run_teams(4, follow, PowerSGD(rank=1), 10)[0]
    exact = exchanges.PowerSGD(((1, 11), (7, 5)), 1).bytes_per_rank(N, 4)
    assert exact == 1.5 * 4 * (11 + 7 + 5)
    assert abs(stats.total.bytes_sent - 10 * exact) <= 20


def test_ranks_by_shape_are_told_once() -> None:
    told = [
        stats.notices for _, stats in run_teams(2, partial(follow, bucket_bytes=8), PowerSGD(min_compression=1.0), 3)
    ]
    sent = 2 * (7 + 5) + 11
    want = f"power_sgd: rank 2 by shape, for 1 of 2 parameters; {2 * N / sent:.1f} times fewer bytes than"
    assert all(len(notices) == 1 and notices[0].startswith(want) for notices in told), told
    alone, small = run_teams(1, follow, PowerSGD(), 3)[0][1], run_teams(2, follow, PowerSGD(), 3)[0][1]
    assert alone.notices == () and "all are averaged exactly" in small.notices[0]
    assert run_teams(2, follow, PowerSGD(rank=1), 3)[0][1].notices == ()


def test_a_given_rank_is_exchanged_in_full_precision() -> None:
    shapes = ((64, 32),)
    assert PowerSGD(rank=4).exchange_of(shapes) == exchanges.PowerSGD(shapes, 4)
    assert PowerSGD().exchange_of(shapes) == exchanges.PowerSGD(shapes, codec=Bf16())
    assert PowerSGD(rank=4, codec="bf16").exchange_of(shapes) == exchanges.PowerSGD(shapes, 4, codec=Bf16())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "int4"}, ("codec", "int4", "bf16")),
        ({"codec": "fp16"}, ("codec", "fp16", "bf16")),
        ({"rank": 0}, ("rank", "0")),
        ({"rank": 1.5}, ("rank", "1.5")),
        ({"rank": True}, ("rank", "True")),
        ({"min_compression": 0}, ("min_compression", "0")),
        ({"min_compression": float("nan")}, ("min_compression", "nan")),
        ({"min_compression": "2"}, ("min_compression", "'2'")),
        ({"error_feedback": 1}, ("error_feedback", "1")),
        ({"start_step": 3}, ("start_step",)),
    ],
)
def test_bad_options(options: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        bagua.algorithms.get("power_sgd", **options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_bucket_of_other_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="5 elements"):
        exchanges.PowerSGD(((2, 3),)).init(torch.zeros(5), Groups(Group(None, 0, 2, (0, 1)), ((0, 1),)))
