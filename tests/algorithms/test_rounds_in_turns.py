"""`mean_moments` of local steps where optimizers of one module take turns, as those of an actor and a critic."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import Algorithm, DiLoCo, LocalSGD, round_moments
from bagua.comm.team import Team
from tests.algorithms.quadratic import N, targets
from tests.rank_threads import run_teams

SIZE, ROUNDS, LR, B1, B2, EPS = 3, 8, 0.05, 0.9, 0.97, 1e-8


def local(interval: int, mean_moments: bool = True) -> LocalSGD:
    return LocalSGD(interval, codec="identity", mean_moments=mean_moments)


class Parts(nn.Module):
    """A parameter for each name; one of them is in a loss."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({name: nn.Parameter(torch.zeros(N)) for name in sorted(set(names))})

    def forward(self, name: str, target: Tensor) -> Tensor:
        return 0.5 * (self.parts[name] - target).square().sum()


def adams(model: Parts) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.Adam([each], lr=LR, betas=(B1, B2), eps=EPS) for name, each in model.parts.items()}


def run(model: Parts, optimizers: dict[str, torch.optim.Optimizer], turns: str, rank: int, first: int = 0) -> None:
    for step, name in enumerate(turns, first):
        optimizers[name].zero_grad()
        model(name, torch.tensor(targets(SIZE, step)[rank], dtype=torch.float32)).backward()
        optimizers[name].step()


def end_step(model: Parts) -> None:
    """The next pass does it where not all optimizers have made a step."""
    with torch.no_grad():
        model(next(iter(model.parts)), torch.zeros(N))


def found(model: Parts, optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, np.ndarray]:
    """[3, N] of each part: weights and both moments."""
    states = {
        name: (param, each.state[param])
        for (name, param), each in zip(model.parts.items(), optimizers.values(), strict=True)
    }
    return {
        name: torch.stack([param.detach(), state["exp_avg"], state["exp_avg_sq"]]).double().numpy().copy()
        for name, (param, state) in states.items()
    }


def train(team: Team, algorithm: Algorithm, turns: str) -> dict[str, np.ndarray]:
    model = Parts(turns)
    optimizers = adams(model)
    bagua.distribute(model, list(optimizers.values()), algorithm, process_group=team)
    run(model, optimizers, turns, team.rank)
    end_step(model)
    result = found(model, optimizers)
    bagua.detach(model)
    return result


def train_apart(team: Team, algorithm: Algorithm, turns: str) -> dict[str, np.ndarray]:
    """Each part is a module of its own."""
    models = {name: Parts(name) for name in sorted(set(turns))}
    optimizers = {name: adams(model)[name] for name, model in models.items()}
    for name, model in models.items():
        bagua.distribute(model, optimizers[name], algorithm, process_group=team)
    for step, name in enumerate(turns):
        run(models[name], optimizers, name, team.rank, step)
    result: dict[str, np.ndarray] = {}
    for name, model in models.items():
        result |= found(model, {name: optimizers[name]})
        bagua.detach(model)
    return result


def oracle(interval: int, turns: str, name: str) -> np.ndarray:
    """[3, SIZE, N]: weights and moments of a part after its turns.

    A round is left out if steps of others after its second one are not as many as in the part's round before.
    """
    x = np.zeros((SIZE, N))
    m, v, count, expected = np.zeros_like(x), np.zeros_like(x), 0, 0
    for begin in range(0, len(turns), interval):
        m_0, v_0, sum_of_m, moved, taken, late = m, v, 0.0, 0.0, 0, 0
        for step in range(begin, begin + interval):
            if turns[step] != name:
                late += taken > 1
                continue
            g = x - targets(SIZE, step)
            taken, count = taken + 1, count + 1
            m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
            divisor = np.sqrt(v / (1 - B2**count)) + EPS
            x = x - LR / (1 - B1**count) * m / divisor
            sum_of_m, moved = sum_of_m + m, moved + LR / (1 - B1**count) * (1 - B1**taken)
        mean = np.tile(x.mean(0), (SIZE, 1))
        if taken and late == expected:
            weights = np.array([1 - B1 ** (taken - j) for j in range(taken)])
            own = (sum_of_m - sum(B1**k for k in range(1, taken + 1)) * m_0) / weights.sum()
            apart = divisor * (x - mean) / moved
            spread = (weights**2).sum() / weights.sum() ** 2
            added, mix = (v - B2**taken * v_0) / (1 - B2**taken), (1 - spread) / (SIZE - spread)
            v = B2**taken * v_0 + (1 - B2**taken) * ((1 - mix) * (own + apart) ** 2 + mix * added)
            m = m + (1 - B1**taken) * apart
        x, expected = mean, late if taken else expected
    return np.stack([x, m, v])


@pytest.mark.parametrize(
    ("interval", "order"),
    [(2, "ab"), (3, "ab"), (4, "ab"), (2, "abc"), (3, "abc"), (3, "aab"), (4, "aabb"), (4, "abbb"), (3, "aaaaab")],
)
def test_is_the_oracles(interval: int, order: str) -> None:
    turns = (order * ROUNDS * interval)[: ROUNDS * interval]
    wants = {name: oracle(interval, turns, name) for name in set(order)}
    for rank, parts in enumerate(run_teams(SIZE, train, local(interval), turns)):
        for name, mine in parts.items():
            np.testing.assert_allclose(mine, wants[name][:, rank], rtol=2e-3, atol=2e-4, err_msg=f"{name} {rank}")


@pytest.mark.parametrize(("interval", "own", "exact"), [(2, 1, "ab"), (4, 2, "b")])
@pytest.mark.parametrize("make", [local, lambda each: DiLoCo(each, 1.0, 0.0, codec="identity", mean_moments=True)])
def test_as_modules_with_rounds_of_their_own(interval: int, own: int, exact: str, make: Any) -> None:
    """With four steps the first round of `a` is left out, as another optimizer's turn came after its second step."""
    turns = "ab" * 2 * ROUNDS
    runs = [run_teams(SIZE, train, make(interval), turns), run_teams(SIZE, train_apart, make(own), turns)]
    plain = run_teams(SIZE, train, local(interval, mean_moments=False), turns)
    for together, apart, without in zip(*runs, plain, strict=True):
        for name in exact:
            np.testing.assert_allclose(together[name], apart[name], rtol=1e-3, atol=1e-5)
            assert np.abs(without[name][2] / apart[name][2] - 1).max() > 0.1


def test_ranks_with_other_numbers_of_steps_keep_their_own_moments() -> None:
    def differ(team: Team, mean_moments: bool) -> dict[str, np.ndarray]:
        turns = "aab" if team.rank == 0 else "abb"
        return train(team, local(3, mean_moments), turns)

    for mine, plain in zip(*(run_teams(SIZE, differ, each) for each in (True, False)), strict=True):
        assert all(np.array_equal(mine[name], plain[name]) for name in "ab")


@pytest.mark.parametrize(("codec", "kept"), [("eden:bits=3", True), ("int4", False)])
def test_with_few_bits_only_whole_rounds_are_used(codec: str, kept: bool) -> None:
    """Beside the momentum, what one step's gradient has moved is small."""

    def told(team: Team, mean_moments: bool) -> tuple[dict[str, np.ndarray], bool]:
        model = Parts("abc")
        optimizers = adams(model)
        algorithm = DiLoCo(3, 1.0, 0.0, codec=codec, mean_moments=mean_moments)
        bagua.distribute(model, list(optimizers.values()), algorithm, process_group=team)
        run(model, optimizers, "abc" * 3, team.rank)
        end_step(model)
        notices = bagua.stats(model).notices
        result = found(model, optimizers)
        bagua.detach(model)
        return result, any("fewer than 4 bits" in each for each in notices)

    for (mine, notice), (plain, _) in zip(*(run_teams(SIZE, told, each) for each in (True, False)), strict=True):
        assert notice == kept
        assert all(np.array_equal(mine[name], plain[name]) == kept for name in "abc")


def test_votes_tell_whether_all_ranks_made_as_many_steps() -> None:
    for size, interval in ((2, 4), (3, 3), (5, 2)):
        for steps in itertools.product(range(interval + 1), repeat=size):
            total = sum(round_moments._vote(each, interval, size) for each in steps)
            for mine in range(1, interval + 1):
                same = total == size * round_moments._vote(mine, interval, size)
                assert same == (steps == (mine,) * size)
    assert round_moments._vote(3, 3, 4096) == round_moments._vote(8, 8, 9) == 1.0
    assert round_moments._vote(1, 3, 255) and not round_moments._vote(1, 3, 256)


def test_resume_within_a_round() -> None:
    """Weights and moments differ by rank, so each rank loads its own."""

    def resume(team: Team, turns: str) -> None:
        wants: dict[int, Any] = {}
        for cut in (None, 1, 2, 6, 7, 8):
            model = Parts(turns)
            optimizers = adams(model)
            bagua.distribute(model, list(optimizers.values()), local(4), process_group=team)
            if cut is not None:
                weights, states, saved = copy.deepcopy(wants[cut])
                model.load_state_dict(weights)
                for each, state in zip(optimizers.values(), states, strict=True):
                    each.load_state_dict(state)
                bagua.load_state_dict(model, saved)
            for step in range(cut or 0, len(turns)):
                run(model, optimizers, turns[step], team.rank, step)
                if cut is None:
                    parts = model.state_dict(), [each.state_dict() for each in optimizers.values()]
                    wants[step + 1] = copy.deepcopy((*parts, bagua.state_dict(model)))
            end_step(model)
            result = found(model, optimizers)
            bagua.detach(model)
            if cut is None:
                whole = result
            assert all(np.array_equal(whole[name], result[name]) for name in result), cut

    run_teams(SIZE, resume, "aabb" * 3)
