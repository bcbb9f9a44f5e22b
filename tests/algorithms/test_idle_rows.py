"""Which rows of parameters no rank uses: the ranks' flags, packed in a small sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import Algorithm, DiLoCo, GradientAllReduce, idle_rows
from bagua.comm.team import Team
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams

SHAPES = [(5, 3), (7,), (), (4, 2, 3, 3), (0,), (3, 0), (2, 6), (600, 2)]


class Table(nn.Module):
    """The sum of products with tensors that the test chooses, which are the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.zeros(shape) for shape in SHAPES])
        self.params[3] = nn.Parameter(torch.zeros(SHAPES[3]).to(memory_format=torch.channels_last))

    def forward(self, factors: list[Tensor | None]) -> Tensor:
        pairs = zip(self.params, factors, strict=True)
        return torch.stack([(param * factor).sum() for param, factor in pairs if factor is not None]).sum()


def factors(rank: int, size: int, seed: int) -> list[Tensor | None]:
    """Of each row one of the ranks has a gradient, or none of them."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Tensor | None] = []
    for shape in SHAPES:
        rows = shape[0] if len(shape) > 1 else 1
        users = torch.randint(0, size + 2, (rows,), generator=generator)
        values = torch.randn(shape, generator=generator) + 0.1
        if shape and values.numel():
            values.view(rows, -1)[::2, 0] = 0.0  # the first element says nothing
        mine = (users == rank).view(-1, *[1] * (len(shape) - 1)) if len(shape) > 1 else users == rank
        values = torch.where(mine, values, torch.zeros(())).reshape(shape)
        made.append(None if not mine.any() and len(made) % 2 else values)
    return made


def trained(team: Team, bits: int | None) -> list[list[Tensor]]:
    model = Table()
    optimizer = torch.optim.Adam(model.parameters())
    codec = "identity" if bits is None else f"eden:bits={bits}"
    bagua.distribute(model, optimizer, GradientAllReduce(codec=codec), process_group=team, bucket_bytes=1 << 11)
    steps = []
    for seed in range(4):
        optimizer.zero_grad()
        model(factors(team.rank, team.size, seed)).backward()
        steps.append([torch.zeros(()) if each.grad is None else each.grad.clone() for each in model.params])
        optimizer.step()
    bagua.detach(model)
    return steps


@pytest.mark.parametrize("flat", [False, True], ids=["parts", "flat, as on a GPU"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_rows_are_zero_where_the_exact_mean_is(size: int, flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if flat:
        monkeypatch.setattr(idle_rows, "_runs_flat", lambda bucket: True)
    exact, coded = run_teams(size, trained, None), run_teams(size, trained, 2)
    idle = rows = 0
    for theirs, ours in zip(exact, coded, strict=True):
        for expected, found in zip(theirs, ours, strict=True):
            for a, b in zip(expected, found, strict=True):
                if a.dim() < 2 or not a.numel():
                    assert a.any() == b.any()
                    continue
                used = a.flatten(1).any(1)
                assert torch.equal(used, b.flatten(1).any(1))
                idle, rows = idle + int((~used).sum()), rows + len(used)
    assert 0.1 < idle / rows < 0.9


def test_error_feedback_keeps_what_it_makes_up_for() -> None:
    """Nothing is cleared: what a rank has sent too much of a row it takes back later."""
    assert all(each > 0 for each in run_teams(2, _with_feedback))


def _with_feedback(team: Team) -> float:
    model = nn.EmbeddingBag(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm = GradientAllReduce(codec="eden", error_feedback=True)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    model(torch.tensor([[1, 2], [3, 4]])).square().sum().backward()
    assert model.weight.grad is not None
    idle = float(model.weight.grad[5:].abs().sum())
    bagua.detach(model)
    return idle


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", [lambda: nn.Linear(32, 8), lambda: nn.Conv2d(32, 8, 3), lambda: nn.Conv1d(32, 8, 1)])
def test_weights_of_inputs_that_are_zero_on_all_ranks_stay(make: Callable[[], nn.Module], size: int) -> None:
    """Inputs 0 to 15 are used, each by one rank, of 16 to 31 none is."""
    for codec in ("eden:bits=1", "eden:bits=2"):
        for before, after in run_teams(size, _of_few_inputs, make, codec):
            moved = (before != after).transpose(0, 1).flatten(1).any(1)
            assert moved[:16].all() and not moved[16:].any()


def _of_few_inputs(team: Team, make: Callable[[], nn.Module], codec: str) -> tuple[Tensor, Tensor]:
    layer = make()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    bagua.distribute(layer, optimizer, "gradient_allreduce", codec=codec, process_group=team)
    weight = layer.get_parameter("weight")
    before, generator = weight.detach().clone(), torch.Generator().manual_seed(team.rank)
    for _ in range(3):
        x = torch.randn((4, 32) + (5,) * (weight.dim() - 2), generator=generator)
        x[:, [i for i in range(32) if i >= 16 or i % team.size != team.rank]] = 0.0
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
    bagua.detach(layer)
    return before, weight.detach()


@pytest.mark.parametrize("flat", [False, True], ids=["parts", "flat, as on a GPU"])
def test_weights_that_nobody_uses_only_decay(flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds, as with exact gradients. A learning rate of zero holds weights, whatever their moments are."""
    if flat:
        monkeypatch.setattr(idle_rows, "_runs_flat", lambda bucket: True)
    runs = [run_teams(2, decayed, algorithm) for algorithm in ("gradient_allreduce", DiLoCo(), None)]
    for exact, found, start in zip(*runs, strict=True):
        assert torch.equal(found[0][40:], exact[0][40:]) and not torch.equal(found[0][40:], start[0][40:])
        assert torch.equal(found[1], start[1]) and not torch.equal(found[0][:40], exact[0][:40])


def decayed(team: Team, algorithm: Algorithm | str | None) -> list[Tensor]:
    """An embedding of which 40 rows are used, and a layer whose learning rate is zero."""
    model, generator = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 8)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(generator=generator)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    if algorithm is not None:
        bagua.distribute(model, optimizer, algorithm, process_group=team)
        generator.manual_seed(1 + team.rank)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randint(0, 40, (256,), generator=generator)).square().mean().backward()
            optimizer.step()
        bagua.detach(model)
    return [model[0].weight.detach(), torch.cat([param.detach().flatten() for param in model[1].parameters()])]


@pytest.mark.process
def test_over_processes(pool: RankPool) -> None:
    pool.run(2, one_step_of_a_sparse_table)


def one_step_of_a_sparse_table() -> None:
    rank = torch.distributed.get_rank()
    model = nn.Embedding(512, 16)
    optimizer = torch.optim.Adam(model.parameters())
    bagua.distribute(model, optimizer, "gradient_allreduce", codec="eden:bits=1")
    for step in range(3):
        optimizer.zero_grad()
        model(torch.arange(4) + 8 * step + 4 * rank).square().sum().backward()
        assert model.weight.grad is not None
        used = model.weight.grad.any(1).nonzero().flatten()
        assert used.tolist() == list(range(8 * step, 8 * step + 8))
        optimizer.step()
    bagua.detach(model)
