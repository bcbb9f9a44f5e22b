"""`bagua.contrib.dion` against the formula in numpy, its momenta, and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import Algorithm
from bagua.codecs import Bf16
from bagua.comm.groups import Groups
from bagua.comm.team import Team
from bagua.contrib.dion import Orthonormalised
from bagua.exchanges import Hierarchical
from tests.checkpoint.runs import Case
from tests.checkpoint.test_reshard import change, parts
from tests.contract.members import CONTRIB_ALGORITHMS
from tests.low_rank_gradients import degenerate, normal
from tests.rank_threads import run_teams, run_threads

STEPS, LR, DECAY, MOMENTUM, LEAST = 8, 0.05, 0.1, 0.9, 2.0**-16
SHAPES = ((12, 9), (1, 13), (9, 16), (12, 9), (2, 3))  # (1, n) are vectors
SCALES = (1.0, 1.0, 0.5, 2.0, 1.0)
NUMEL = sum(n * m for n, m in SHAPES)


def dion(**options: Any) -> Algorithm:
    return CONTRIB_ALGORITHMS["dion"](**options)


def exchange_of(rank_fraction: float = 0.25, momentum: float = MOMENTUM, **options: Any) -> Orthonormalised:
    return Orthonormalised(SHAPES, SCALES, rank_fraction, momentum, **options)


def gradient(rank: int, step: int, numel: int = NUMEL) -> np.ndarray:
    return normal(rank, step, numel)


def gram_schmidt(p: np.ndarray) -> np.ndarray:
    p = p.copy()
    for i in range(p.shape[1]):
        p[:, i] /= np.linalg.norm(p[:, i])
        p[:, i + 1 :] -= np.outer(p[:, i], p[:, i] @ p[:, i + 1 :])
    return p


class Oracle:
    """The formula for one matrix [n, m], with the first Q [m, k]."""

    def __init__(self, ranks: int, n: int, q: np.ndarray, momentum: float) -> None:
        self.q, self.mu = q, momentum
        self.m = np.zeros((ranks, n, q.shape[0]))

    def step(self, gradients: np.ndarray) -> np.ndarray:
        """P Q^T of the gradients [ranks, n, m]."""
        b = self.m + gradients
        p = gram_schmidt(np.mean([each @ self.q for each in b], 0))
        own = [each.T @ p for each in b]
        self.m = np.stack([each - (1 - self.mu) * p @ r.T for each, r in zip(b, own, strict=True)])
        r = np.mean(own, 0)
        length = np.linalg.norm(r, axis=0)
        self.q = r / np.maximum(length, LEAST * length.max())
        return p @ self.q.T


def drive(groups: Groups, exchange: Any, steps: int, give: Callable[..., np.ndarray] = gradient) -> tuple[list, list]:
    """Results of each step, and the states after them."""
    state = exchange.init(torch.zeros(NUMEL, dtype=torch.float64), groups)
    results, states = [], [{name: tensor.clone() for name, tensor in state.items()}]
    for step in range(steps):
        x = torch.tensor(give(groups.rank, step))
        exchange.run(x, state, groups, step)
        results.append(x)
        states.append({name: tensor.clone() for name, tensor in state.items()})
    return results, states


def mean_of(give: Callable[..., np.ndarray], ranks: int) -> Callable[[int, int], np.ndarray]:
    return lambda _, step: np.mean([give(rank, step) for rank in range(ranks)], 0)


@pytest.mark.parametrize("rank_fraction", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_packed_matrices_follow_the_formula(ranks: int, rank_fraction: float) -> None:
    exchange = exchange_of(rank_fraction)
    runs = run_threads(ranks, drive, exchange, STEPS)
    places, right = exchange._layout.matrices, runs[0][1][0]["right"].numpy()
    assert [each.r for each in places] == [exchange.rank_of(each.n, each.m) for each in places]
    oracles = [
        Oracle(ranks, each.n, right[each.right : each.right + each.m * each.r].reshape(each.r, each.m).T, MOMENTUM)
        for each in places
    ]
    for step in range(STEPS):
        given = np.stack([gradient(rank, step) for rank in range(ranks)])
        want = given.mean(0)
        for each, oracle in zip(places, oracles, strict=True):
            part = slice(each.start, each.start + each.n * each.m)
            want[part] = SCALES[each.number] * oracle.step(given[:, part].reshape(ranks, each.n, each.m)).reshape(-1)
        for results, _ in runs:
            assert torch.equal(results[step], runs[0][0][step]), "all ranks: the same bits"
            assert np.abs(results[step].numpy() - want).max() < 1e-9, step
    for rank, (_, states) in enumerate(runs):
        momentum = np.concatenate([oracle.m[rank].reshape(-1) for oracle in oracles])
        assert np.abs(states[-1]["momentum"].numpy() - momentum).max() < 1e-9


@pytest.mark.parametrize("rank_fraction", [0.1, 0.25, 1.0])
def test_the_mean_momentum_is_that_of_the_mean_gradient(rank_fraction: float) -> None:
    """Whatever the rank is: the ranks together are one that has all their samples."""
    exchange, steps = exchange_of(rank_fraction), 20
    runs = run_threads(3, drive, exchange, steps)
    ((results, states),) = run_threads(1, drive, exchange, steps, mean_of(gradient, 3))
    for step in range(steps):
        assert torch.allclose(runs[0][0][step], results[step], rtol=0, atol=1e-8), step
        mean = torch.stack([each[step + 1]["momentum"] for _, each in runs]).mean(0)
        assert torch.allclose(mean, states[step + 1]["momentum"], rtol=0, atol=1e-8), step
        assert not torch.allclose(mean, runs[0][1][step + 1]["momentum"], atol=0.1), "each rank has its own"


def test_full_rank_is_heavy_ball_momentum() -> None:
    """Then P R^T is all of B: M = mu (M + G), and the step is orthogonal where the matrix is square."""
    _, states = run_threads(2, drive, exchange_of(1.0), 6)[0]
    momentum = np.zeros(NUMEL)
    for step in range(6):
        momentum = MOMENTUM * (momentum + gradient(0, step))
    for each in exchange_of(1.0)._layout.matrices:
        ours = states[-1]["momentum"][each.dense : each.dense + each.n * each.m].numpy()
        if each.n <= each.m:
            assert np.abs(ours - momentum[each.start : each.start + each.n * each.m]).max() < 1e-9


def test_differences_between_ranks_do_not_add_up() -> None:
    """Gradients that differ for ever, with a mean of which nothing is left but noise."""

    def give(rank: int, step: int) -> np.ndarray:
        return (-1) ** rank * gradient(9, 0) + gradient(rank, step)

    for rank_fraction in (0.25, 1.0):
        largest = []
        for steps in (200, 400):
            _, states = run_threads(2, drive, exchange_of(rank_fraction), steps, give)[0]
            largest.append(float(states[-1]["momentum"].abs().max()))
        assert largest[1] < 1.25 * largest[0], rank_fraction


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_is_not_finite_is_seen_and_forgotten(ranks: int, bad: float) -> None:
    hit, at, element = exchange_of()._layout.matrices[0], 3, 5

    def give(rank: int, step: int) -> np.ndarray:
        x = gradient(rank, step)
        if (rank, step) == (0, at):
            x[hit.start + element] = bad
        return x

    matrix = slice(hit.start, hit.start + hit.n * hit.m)
    for rank, (results, states) in enumerate(run_threads(ranks, drive, exchange_of(), 8, give)):
        assert [bool(x.isfinite().all()) for x in results] == [step != at for step in range(8)]
        assert not results[at][matrix].isfinite().any(), "no part of that step may be made"
        rest = torch.cat([results[at][: matrix.start], results[at][matrix.stop :]])
        assert rest.isfinite().all(), "steps of other matrices are as ever"
        before, after = (states[each]["momentum"][hit.dense : hit.dense + hit.n * hit.m] for each in (at, at + 1))
        want = before.clone()
        if rank == 0:
            want[element] = 0
        assert torch.allclose(after, want, atol=1e-12)
        assert all(tensor.isfinite().all() for state in states for tensor in state.values())


def test_zero_and_rank_deficient_gradients() -> None:
    """No step without a gradient; rounding does not become a step of full length; a dead Q comes alive."""

    def give(rank: int, step: int) -> np.ndarray:
        found = degenerate(SHAPES, step)
        return gradient(rank, step) if found is None else found

    for results, _ in run_threads(2, drive, exchange_of(0.5), 6, give):
        assert all(not x.any() for x in results[:2])
        for each in exchange_of()._layout.matrices:
            step = results[3][each.start : each.start + each.n * each.m].view(each.n, each.m)
            sizes = torch.linalg.svdvals(step) / SCALES[each.number]
            assert sizes[0] == pytest.approx(1, abs=1e-6) and (sizes[1:] < 1e-6).all()
            rank = torch.linalg.matrix_rank(results[5][each.start : each.start + each.n * each.m].view(each.n, each.m))
            assert rank == exchange_of(0.5).rank_of(each.n, each.m)


@pytest.mark.parametrize("nodes", [[0, 0, 1], [0, 1, 0, 1], [0, 0]])
def test_hierarchical_is_the_same_step(nodes: list[int]) -> None:
    runs = run_threads(len(nodes), drive, Hierarchical(exchange_of()), STEPS, nodes=nodes, hierarchical=True)
    flat = run_threads(len(nodes), drive, exchange_of(), STEPS)
    for step in range(STEPS):
        for results, _ in runs:
            assert torch.equal(results[step], runs[0][0][step])
            assert torch.allclose(results[step], flat[0][0][step], rtol=0, atol=1e-8)


def test_factors_in_bf16() -> None:
    exact, rounded = (run_threads(2, drive, exchange_of(**options), 3) for options in ({}, {"codec": Bf16()}))
    for step in range(3):
        off = (exact[0][0][step] - rounded[0][0][step]).abs().max()
        assert 1e-5 < off < 0.2, step
        assert torch.equal(rounded[0][0][step], rounded[1][0][step])
    saved = exchange_of(codec=Bf16()).bytes_per_rank(NUMEL, 2)
    assert saved == pytest.approx(exchange_of().bytes_per_rank(NUMEL, 2) / 2, rel=0.01)


class Parts(nn.Module):
    """Matrices of several kinds, a vector, and a table that AdamW trains; in fp64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.tall, self.wide = nn.Parameter(made(9, 5)), nn.Parameter(made(4, 7))
        self.turned = nn.Parameter(made(5, 8).t())
        self.kernel = nn.Parameter(made(6, 2, 2, 1))
        self.bias, self.table = nn.Parameter(made(11)), nn.Parameter(made(6, 4))


def targets(rank: int, step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng([rank, step])
    return {name: generator.normal(size=tuple(param.shape)) for name, param in Parts().named_parameters()}


def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Its gradients are x - target."""
    wanted = targets(rank, step)
    return sum(
        ((param - torch.tensor(wanted[name])).square().sum() for name, param in module.named_parameters()),
        torch.zeros(()),
    ) / 2  # fmt: skip


def optimizers(params: Any) -> list[torch.optim.Optimizer]:
    """AdamW for the last one."""
    *first, table = params
    return [torch.optim.SGD(first, lr=LR, weight_decay=DECAY), torch.optim.AdamW([table], lr=LR)]


def expected(ranks: int, rank_fraction: float) -> dict[str, np.ndarray]:
    """The weights in the end. With a bucket for each parameter every first Q is of the same generator."""
    model = Parts()
    adamw = torch.optim.AdamW([model.table], lr=LR)
    x = {name: param.detach().numpy().copy() for name, param in model.named_parameters()}
    oracles: dict[str, Oracle] = {}
    for step in range(STEPS):
        wanted = [targets(rank, step) for rank in range(ranks)]
        for name in x:
            given = np.stack([x[name] - each[name] for each in wanted])
            if name == "table":
                model.table.grad = torch.tensor(given.mean(0))
                adamw.step()
                x[name] = model.table.detach().numpy().copy()
                continue
            move = given.mean(0)
            if name != "bias":
                shape = x[name].shape
                flat = given.reshape(ranks, shape[0], -1)
                flat = flat.transpose(0, 2, 1) if name == "turned" else flat
                n, m = flat.shape[1:]
                if name not in oracles:
                    k = int(np.ceil(rank_fraction * min(n, m)))
                    one = Orthonormalised(((n, m),), (1.0,), rank_fraction)
                    ((_, states),) = run_threads(1, first_right, one, n * m)
                    oracles[name] = Oracle(ranks, n, states.reshape(k, m).T, MOMENTUM)
                turned = oracles[name].step(flat)
                turned = turned.T if name == "turned" else turned
                move = np.sqrt(shape[0] / (x[name].size / shape[0])) * turned.reshape(shape)
            x[name] = x[name] - LR * (move + DECAY * x[name])
    return x


def first_right(groups: Groups, exchange: Orthonormalised, numel: int) -> tuple[None, np.ndarray]:
    return None, exchange.init(torch.zeros(numel, dtype=torch.float64), groups)["right"].numpy()


def train(ranks: int, loss: Any, bucket_bytes: int, **options: Any) -> Any:
    """`Parts` on simulated ranks."""
    return bagua.simulate(
        dion(**options),
        ranks=ranks,
        model=Parts,
        loss=loss,
        steps=STEPS,
        optimizer=optimizers,
        bucket_bytes=bucket_bytes,
    )


@pytest.mark.parametrize(("ranks", "rank_fraction"), [(1, 0.25), (1, 1.0), (2, 0.25), (3, 0.6), (4, 0.25)])
def test_training_follows_the_formula(ranks: int, rank_fraction: float) -> None:
    run = train(ranks, loss, 8, rank_fraction=rank_fraction, momentum=MOMENTUM)
    want, first = expected(ranks, rank_fraction), dict(run.models[0].named_parameters())
    for model in run.models:
        for name, param in model.named_parameters():
            assert np.abs(param.detach().numpy() - want[name]).max() < 1e-8, name
            assert torch.equal(param, first[name]), "all ranks: the same bits"
    (notice,) = [each for each in run.stats[0].notices if each.startswith("dion")]
    assert "4 of 6 parameters" in notice


def test_one_rank_has_no_other_algorithm() -> None:
    """Two ranks with the same samples and one rank make the same steps."""
    runs = [train(ranks, same_loss, 300) for ranks in (1, 2)]
    for one, two in zip(runs[0].models[0].parameters(), runs[1].models[0].parameters(), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-9)
    assert runs[0].bytes_sent == 0 and runs[1].bytes_sent > 0


def same_loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    return loss(module, 0, step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_payload_types(dtype: torch.dtype) -> None:
    """Momenta and factors are fp32; only the steps are rounded."""

    def steps_of(groups: Groups, kind: torch.dtype) -> tuple[torch.Tensor, torch.dtype]:
        exchange = exchange_of()
        state = exchange.init(torch.zeros(NUMEL, dtype=kind), groups)
        x = torch.tensor(gradient(groups.rank, 0)).to(dtype).to(kind)
        exchange.run(x, state, groups, 0)
        assert x.dtype is kind
        return x.double(), state["momentum"].dtype

    exact = run_threads(2, steps_of, torch.float64)
    for x, kept in run_threads(2, steps_of, dtype):
        assert kept is torch.float32
        assert (x - exact[0][0]).abs().max() < (2e-2 if dtype is torch.bfloat16 else 1e-4)


def test_bytes() -> None:
    """k (n + m) elements of 1024 x 1024: a quarter of 2048 each."""
    assert dion().bytes_per_rank(1 << 20, 2) == 4 * 256 * 2048
    assert dion(codec="bf16").bytes_per_rank(1 << 20, 2) == 2 * 256 * 2048
    assert dion(rank_fraction=1 / 64).bytes_per_rank(1 << 20, 4) == 1.5 * 4 * 16 * 2048


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rank_fraction": 0}, "rank_fraction"),
        ({"rank_fraction": 1.5}, "rank_fraction"),
        ({"rank_fraction": True}, "rank_fraction"),
        ({"rank_fraction": float("nan")}, "rank_fraction"),
        ({"momentum": 1}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
        ({"codec": "minmax_uint8"}, "'minmax_uint8'"),
        ({"codec": "fp16"}, "'fp16'"),
        ({"hierarchical": 1}, "hierarchical"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        dion(**options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9), "SGD has momentum=0.9 for 'tall'.*momentum=0"),
        (lambda params: torch.optim.AdamW(params, lr=LR), r"got AdamW; pass \[torch.optim.SGD"),
        (lambda params: torch.optim.SGD([list(params)[4]], lr=LR), "an SGD that trains none; pass"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(make: Callable[..., torch.optim.Optimizer], words: str) -> None:
    with pytest.raises(ValueError, match=f"optimizers: .*{words}"):
        bagua.simulate(dion(), ranks=2, model=Parts, loss=loss, steps=1, optimizer=make)


def test_sparse_gradients_are_refused() -> None:
    def make(params: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(params, lr=LR)]

    with pytest.raises(ValueError, match="sparse gradients of '0.weight'"):
        bagua.simulate(
            dion(),
            ranks=2,
            model=lambda: nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)),
            loss=lambda module, rank, step: module(torch.tensor([1, 2])).sum(),
            steps=1,
            optimizer=make,
        )


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1), (1, 2)])
def test_the_mean_momentum_outlives_another_number_of_ranks(sizes: tuple[int, int], tmp_path: Path) -> None:
    saved, loaded, later = change(Case(dion(), plain_sgd), *sizes, tmp_path)
    for name in ("momentum", "right"):
        old, new = parts(saved, name), parts(loaded, name)
        assert old.keys() == new.keys() and old
        for key, copies in old.items():
            assert len(copies) == sizes[0] and len(new[key]) == sizes[1] and copies[0].any()
            want, got = (torch.stack(each).mean(0) for each in (copies, new[key]))
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert all(torch.equal(state["model"]["inner.weight"], later[0]["model"]["inner.weight"]) for state in later)


def added(team: Team, anew: bool) -> tuple[bool, bool]:
    """SGD gets a second matrix. Whether a notice asks for `distribute`, and whether the saved state has both."""

    def made() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))

    def train(model: nn.Module, sgd: torch.optim.Optimizer) -> None:
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(3, 6)).square().sum().backward()
            sgd.step()

    model = made()
    sgd = torch.optim.SGD(model[0].parameters(), lr=LR)
    bagua.distribute(model, sgd, dion(), process_group=team)
    train(model, sgd)
    sgd.add_param_group({"params": list(model[1].parameters())})
    if anew:
        bagua.distribute(model, sgd, dion(), process_group=team)
    train(model, sgd)
    told = any("call bagua.distribute() again" in notice for notice in bagua.stats(model).notices)
    state = bagua.state_dict(model)
    bagua.detach(model)
    other = made()
    sgd = torch.optim.SGD(other.parameters(), lr=LR)
    bagua.distribute(other, sgd, dion(), process_group=team)
    try:
        bagua.load_state_dict(other, state)
        train(other, sgd)
    except ValueError:
        return told, False
    finally:
        bagua.detach(other)
    return told, True


@pytest.mark.parametrize("anew", [False, True])
def test_matrices_that_sgd_gets_later(anew: bool) -> None:
    """Those are orthonormalised from the next `distribute` on; without, a notice says that they are not."""
    assert run_teams(2, added, anew) == [(not anew, anew)] * 2
