"""`gradient_as_bucket_view=False`: gradients that are kept over `zero_grad()` stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team
from tests.engine.training import Branches, batch, equal, seeded
from tests.rank_threads import run_teams

TASKS = 3


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, TASKS))


def projected(grads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """PCGrad (arXiv 2001.06782), tasks in order: each gradient loses what conflicts with the other tasks' ones."""
    total = [torch.zeros_like(part) for part in grads[0]]
    for mine in grads:
        kept = torch.cat([part.reshape(-1) for part in mine])
        for other in grads:
            flat = torch.cat([part.reshape(-1) for part in other])
            dot = kept @ flat
            if dot < 0:
                kept = kept - dot / (flat @ flat) * flat
        at = 0
        for part in total:
            part += kept[at : at + part.numel()].view_as(part)
            at += part.numel()
    return total


def pcgrad(team: Team | None, size: int, copies: bool = False, **options: Any) -> dict[str, Tensor]:
    """Steps with a backward pass for each task; without a team: of all ranks' data, in one process."""
    model = seeded(make, 0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    if team is not None:
        bagua.distribute(model, optimizer, process_group=team, **options)
    params = list(model.parameters())
    for step in range(5):
        x = torch.cat([batch(rank, step) for rank in (range(size) if team is None else [team.rank])]).double()
        grads: list[list[Tensor]] = []
        for task in range(TASKS):
            optimizer.zero_grad()
            # targets that pull the tasks apart
            (model(x)[:, task] - (-1.0) ** task * x.sum(1)).square().mean().backward()
            grads.append([param.grad.clone() if copies else param.grad for param in params])  # pyright: ignore
        for param, grad in zip(params, projected(grads), strict=True):
            param.grad = grad
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_pcgrad_with_kept_gradients_is_that_of_one_process(bucket_bytes: int) -> None:
    want = pcgrad(None, 2)
    found = run_teams(2, lambda team: pcgrad(team, 2, bucket_bytes=bucket_bytes, gradient_as_bucket_view=False))
    assert equal(found[0], found[1])
    assert distance(found[0], want) < 1e-12
    # By default the kept gradients are those of the last task, as documented; copies are as good as the option.
    assert distance(run_teams(2, lambda team: pcgrad(team, 2))[0], want) > 1e-3
    assert distance(run_teams(2, lambda team: pcgrad(team, 2, copies=True))[0], want) < 1e-12


def same_objects(team: Team, algorithm: str) -> None:
    """Accumulation, zeroing in place and passes within no_sync write into `.grad` as they do without an engine."""
    model = seeded(make, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if algorithm in ("qadam", "zero_one_adam"):
        kinds = {"qadam": bagua.optim.QAdam, "zero_one_adam": bagua.optim.ZeroOneAdam}
        optimizer = kinds[algorithm](model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, algorithm, process_group=team, gradient_as_bucket_view=False)
    params = list(model.parameters())
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with bagua.no_sync(model):
            model(batch(team.rank, 10 + step)).square().mean().backward()
        held = [param.grad for param in params]
        model(batch(team.rank, step)).square().mean().backward()
        assert all(param.grad is grad for param, grad in zip(params, held, strict=True))
        model(batch(team.rank, 20 + step)).square().mean().backward()
        assert all(param.grad is grad for param, grad in zip(params, held, strict=True))
        storages = {grad.untyped_storage().data_ptr() for grad in held}  # pyright: ignore
        assert len(storages) == len(params)
        optimizer.step()


@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", "bytegrad", "power_sgd", "qadam", "zero_one_adam", "async", "decentralized"]
)
def test_grad_stays_the_same_object(algorithm: str) -> None:
    run_teams(2, same_objects, algorithm)


def zeroed_by_hand(team: Team, algorithm: str, by_hand: bool) -> dict[str, Tensor]:
    """With the zero_grad of old scripts, or that of torch."""
    model = seeded(make, 0)
    made = bagua.optim.QAdam(model.parameters(), lr=0.01, warmup_steps=2) if algorithm == "qadam" else None
    optimizer = made or torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=64)
    for step in range(4):
        for param in model.parameters() if by_hand else ():
            if param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()
        if not by_hand:
            optimizer.zero_grad(set_to_none=False)
        model(batch(team.rank, step)).square().sum().backward()
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "qadam", "local_sgd"])
def test_gradients_can_be_detached_in_place(algorithm: str) -> None:
    assert equal(run_teams(2, zeroed_by_hand, algorithm, True), run_teams(2, zeroed_by_hand, algorithm, False))


def by_view(team: Team, view: bool, how: str) -> list[Any]:
    """Gradients after each of some passes, with both values of the option."""
    found: list[Any] = []
    if how == "sparse":
        model = seeded(lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)), 0)
    elif how == "sparse tied":  # a sparse gradient of a parameter that lies in a bucket
        model = seeded(lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 9, bias=False)), 0)
        model[1].weight = model[0].weight
    else:
        model = seeded(Branches, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"bucket_bytes": 64, "static_graph": how == "static"}
    bagua.distribute(model, optimizer, process_group=team, gradient_as_bucket_view=view, **options)
    kept: list[tuple[Any, Any]] = []
    for step in range(6):
        optimizer.zero_grad(set_to_none=how != "zeroed")
        if how.startswith("sparse"):
            model(torch.tensor([step, team.rank, 8])).square().sum().backward()
        else:
            # branch 3 is used by nobody at times, 2 by one rank at times, 0 by all
            use = [0, 1, 2, 3] if step == 0 and how != "static" else [0, 1 + (team.rank + step * (how != "static")) % 2]
            loss = model(batch(team.rank, step, 4), use)
            if how == "create_graph":
                loss.square().backward(create_graph=True)
            else:
                loss.backward()
        grads = [param.grad for param in model.parameters()]
        copies = [None if grad is None else grad.detach().clone() for grad in grads]
        found.append([copy.to_dense() if copy is not None else None for copy in copies])
        kept += zip(grads, copies, strict=True)
        optimizer.step()
    if not view and how != "zeroed":
        for grad, copy in kept:
            assert grad is None or equal(grad.detach().to_dense(), copy.to_dense())
    return found


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("how", ["unused", "zeroed", "static", "create_graph", "sparse", "sparse tied"])
def test_the_option_changes_no_bit(how: str) -> None:
    views, own = run_teams(2, by_view, True, how), run_teams(2, by_view, False, how)
    assert equal(views, own)
    if how != "zeroed":
        assert equal(own[0][0], own[1][0])


class TwoViews(torch.autograd.Function):
    """Its gradients are two views of one tensor."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        whole = grads[0].clone()
        return whole.view(-1), whole.view(-1)


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, apart: bool) -> Tensor:
        both = self.left * 1 + self.right * 3 if apart else TwoViews.apply(self.left, self.right)
        return (both * x).sum()


def aliased(team: Team) -> list[list[float]]:
    """On one rank the gradients of two parameters share memory, on the other they differ."""
    model = Aliased()
    bagua.distribute(model, [], process_group=team, gradient_as_bucket_view=False)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(4), team.rank == 1).backward()
    return [model.left.grad.tolist(), model.right.grad.tolist()]  # pyright: ignore


def test_gradients_that_share_memory_get_a_mean_each() -> None:
    assert run_teams(2, aliased) == [[[1.0] * 4, [2.0] * 4]] * 2


def mismatched(team: Team) -> str:
    model = make()
    with pytest.raises(bagua.RankMismatchError) as caught:
        bagua.distribute(model, [], process_group=team, gradient_as_bucket_view=team.rank == 0)
    return str(caught.value)


def test_ranks_must_agree_and_the_type_is_checked() -> None:
    want = "gradient_as_bucket_view differs: rank 1 has False, rank 0 has True"
    assert run_teams(2, mismatched) == [want] * 2

    def wrong(team: Team) -> None:
        with pytest.raises(TypeError, match="gradient_as_bucket_view: expected True or False, got 'no'"):
            bagua.distribute(make(), [], process_group=team, gradient_as_bucket_view="no")  # pyright: ignore

    run_teams(1, wrong)
