"""Replicas that differ become equal: weights at `average`, weights and optimizer state at a hand-over or a switch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from bagua.algorithms import AsyncModelAverage, Decentralized, DiLoCo, LocalSGD, Warmup
from bagua.comm.team import Team
from tests.engine.training import Branches, Net, batch, equal, seeded, train, values
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def zero_one(params: Any) -> torch.optim.Optimizer:
    """The steps 5, 7 and 9 are local, and the ranks meet after each of them."""
    return bagua.optim.ZeroOneAdam(params, lr=1e-2, var_freeze_step=2, local_step_scaler=2, local_step_clipper=4)


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def state_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """By parameter, copied."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in optimizer.state[param].items()}
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def of_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def is_mean(found: Tensor, ranks: list[Tensor]) -> bool:
    mean = sum(each.double() for each in ranks) / len(ranks)
    return torch.allclose(found.double(), mean, rtol=1e-5, atol=1e-7)


def are_means(
    model: nn.Module, optimizer: torch.optim.Optimizer, before: list[tuple[list[Tensor], list[dict]]]
) -> bool:
    """Whether weights and floating state are means of what the ranks had, and all ranks hold the same."""
    now = ([param.detach().clone() for param in parameters(model)], state_of(optimizer))
    same = all(equal(each, now) for each in of_all(now))
    weights = all(is_mean(now[0][i], [each[0][i] for each in before]) for i in range(len(now[0])))
    states = all(
        is_mean(now[1][i][key], [each[1][i][key] for each in before])
        for i, state in enumerate(now[1])
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim()
    )
    return same and weights and states


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[dict]]:
    return [param.detach().clone() for param in parameters(model)], state_of(optimizer)


def handed_over(algorithm: Any, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """A hook of ours runs before the engine's, and sees what each rank has at the hand-over."""
    model = seeded(Net, dist.get_rank())
    optimizer = make(parameters(model))
    seen: list[tuple[list[Tensor], list[dict]]] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(snapshot(model, optimizer)))
    bagua.distribute(model, optimizer, algorithm)
    train(model, optimizer, range(3))
    before = of_all(seen[2])
    assert not equal(before[0], before[1])
    assert are_means(model, optimizer, before)
    train(model, optimizer, range(3, 9))
    after = of_all(snapshot(model, optimizer))
    assert all(equal(each, after[0]) for each in after)


@pytest.mark.parametrize("make", [adam, sgd])
def test_a_hand_over_averages_weights_and_optimizer_state(pool: RankPool, make: Any) -> None:
    """Replicas of an algorithm that exchanges gradients stay equal, bit for bit, afterwards."""
    pool.run(3, handed_over, Warmup(3, LocalSGD(communication_interval=8), "gradient_allreduce"), make)


@pytest.mark.parametrize(
    "first", [Decentralized(topology="ring"), DiLoCo(communication_interval=5)], ids=["ring", "diloco"]
)
def test_replicas_stay_equal_after_a_hand_over(pool: RankPool, first: Any) -> None:
    pool.run(2, stays_equal, Warmup(3, first, "bytegrad"))


def stays_equal(algorithm: Any) -> None:
    model = seeded(Net, dist.get_rank())
    optimizer = adam(parameters(model))
    bagua.distribute(model, optimizer, algorithm)
    train(model, optimizer, range(8))
    after = of_all(snapshot(model, optimizer))
    assert equal(after[0], after[1])


def fallen_back() -> None:
    """A guard's fallback is a hand-over too."""
    model = seeded(Net, dist.get_rank())
    optimizer = adam(parameters(model))
    guard = bagua.Guard(every=1, max_relative_error=1e-9, fallback="gradient_allreduce")
    bagua.distribute(model, optimizer, DiLoCo(communication_interval=3, codec="int4"), guard=guard)
    train(model, optimizer, range(8))
    assert any("takes over" in notice for notice in bagua.stats(model).notices)
    after = of_all(snapshot(model, optimizer))
    assert equal(after[0], after[1])


def test_a_fallback_starts_from_equal_replicas(pool: RankPool) -> None:
    pool.run(2, fallen_back)


def unevenly_used() -> None:
    """Rank 0 uses branches 0 and 1, rank 1 branches 1 and 2; nobody uses 3."""
    rank = dist.get_rank()
    model = seeded(Branches, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    seen: list[list[dict]] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(state_of(optimizer)))
    bagua.distribute(model, optimizer, Warmup(2, LocalSGD(communication_interval=9), "gradient_allreduce"))
    for step in range(2):
        optimizer.zero_grad()
        model(batch(rank, step, 4), (rank, rank + 1)).backward()
        optimizer.step()
    zero, one = of_all(seen[1])
    now = state_of(optimizer)
    assert all(equal(each, now) for each in of_all(now))
    for place in (0, 1):  # weight and bias
        assert equal(now[place], zero[place]) and now[place]["step"] == 2
        assert is_mean(now[2 + place]["exp_avg"], [zero[2 + place]["exp_avg"], one[2 + place]["exp_avg"]])
        assert equal(now[4 + place], one[4 + place]) and now[4 + place]["step"] == 2 and not zero[4 + place]
        assert not now[6 + place]


def test_a_parameter_that_some_ranks_never_used(pool: RankPool) -> None:
    pool.run(2, unevenly_used)


def switched(algorithm: Any, make: Callable[[Any], torch.optim.Optimizer], steps: int) -> None:
    model = seeded(Net, dist.get_rank())
    optimizer = make(parameters(model))
    bagua.distribute(model, optimizer, algorithm)
    train(model, optimizer, range(steps))
    before = of_all(snapshot(model, optimizer))
    assert not equal(before[0][0], before[1][0])
    bagua.distribute(model, optimizer, "gradient_allreduce")
    assert are_means(model, optimizer, before)
    train(model, optimizer, range(steps, steps + 2))
    after = of_all(snapshot(model, optimizer))
    assert equal(after[0], after[1])


@pytest.mark.parametrize(
    ("algorithm", "make", "steps"),
    [("zero_one_adam", zero_one, 5), (LocalSGD(communication_interval=8), adam, 3)],
    ids=["zero_one_adam", "local_sgd"],
)
def test_a_switch_keeps_the_mean(pool: RankPool, algorithm: Any, make: Any, steps: int) -> None:
    """Also where gradients are exchanged in some steps only, within an interval of local steps."""
    pool.run(2, switched, algorithm, make, steps)


def averaged_within_an_interval() -> None:
    model = seeded(Net, dist.get_rank())
    optimizer = zero_one(parameters(model))
    bagua.distribute(model, optimizer, "zero_one_adam")
    for step in range(10):
        train(model, optimizer, [step])
        before = of_all(snapshot(model, optimizer)[0])
        assert equal(before[0], before[1]) == (step not in (4, 6, 8))
        meters = bagua.stats(model).total.bytes_sent
        bagua.average_parameters(model)
        after = of_all(snapshot(model, optimizer)[0])
        assert equal(after[0], after[1])
        assert all(is_mean(now, [each[i] for each in before]) for i, now in enumerate(after[0]))
        assert not equal(before[0], before[1]) or equal(before[0], after[0])
        assert meters == bagua.stats(model).total.bytes_sent or not equal(before[0], before[1])


def test_average_within_an_interval_of_local_steps(pool: RankPool) -> None:
    """After meetings replicas are equal, and nothing changes."""
    pool.run(2, averaged_within_an_interval)


def from_async() -> None:
    model = seeded(Net, dist.get_rank())
    optimizer = adam(parameters(model))
    bagua.distribute(model, optimizer, AsyncModelAverage(sync_interval_ms=0))
    train(model, optimizer, range(4))
    bagua.distribute(model, optimizer, "bytegrad")
    train(model, optimizer, range(4, 6))
    after = of_all((snapshot(model, optimizer), {k: v for k, v in values(model).items() if "norm" not in k}))
    assert equal(after[0], after[1])


def test_a_switch_from_async(pool: RankPool) -> None:
    pool.run(2, from_async)


class Pair(nn.Module):
    """A teacher that is a moving average of the student."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 3)
        self.teacher = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) - self.teacher(x)


def teachers(algorithm: Any) -> tuple[bool, bool, bool]:
    """Whether the ranks' teachers are equal before an average of the module and after it, and their mean is exact."""
    model = seeded(Pair, 0)
    assert isinstance(model, Pair)
    optimizer = sgd(model.student.parameters())
    bagua.distribute(model, optimizer, algorithm)
    students: list[list[Tensor]] = []
    for step in range(4):
        train(model, optimizer, [step])
        students.append([param.detach().clone() for param in model.student.parameters()])
        with torch.no_grad():
            for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    found = of_all(list(model.teacher.parameters()))
    bagua.average_parameters(model)
    after = of_all(list(model.teacher.parameters()))
    with torch.no_grad():
        for param in model.teacher.parameters():  # as docs/faq.md has it
            dist.all_reduce(param)
            param.div_(dist.get_world_size())
    wanted = [param.detach() for param in seeded(Pair, 0).get_submodule("teacher").parameters()]
    for each in zip(*of_all(students), strict=True):
        wanted = [slow.lerp(sum(ranks) / len(ranks), 0.1) for slow, *ranks in zip(wanted, *each, strict=True)]
    exact = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.teacher.parameters(), wanted, strict=True))
    return equal(found[0], found[1]), equal(after[0], after[1]), exact


@pytest.mark.parametrize(
    ("algorithm", "alike"), [("gradient_allreduce", True), (LocalSGD(communication_interval=3), False)]
)
def test_teachers_that_the_script_updates(pool: RankPool, algorithm: Any, alike: bool) -> None:
    """They differ where the weights do; their mean is the teacher of the mean student."""
    assert pool.run(2, teachers, algorithm) == [(alike, alike, True)] * 2


def unlike_steps(team: Team, algorithm: Any, steps: Sequence[int]) -> tuple[str, ...]:
    """At most 12 steps in intervals of 8: the exchanges come out even."""
    model = nn.Linear(6, 3)
    optimizer = sgd(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    for _ in range(2):
        for step in range(steps[team.rank]):
            optimizer.zero_grad()
            model(batch(team.rank, step)).square().mean().backward()
            optimizer.step()
        bagua.average_parameters(model)
    notices = bagua.stats(model).notices
    bagua.detach(model)
    return tuple(notice for notice in notices if "average_parameters" in notice)


def test_a_mean_of_ranks_with_different_numbers_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    """As where some ranks have a batch more, and the script forgets `join`. Told once, on rank 0 in the log."""
    with caplog.at_level(logging.WARNING, "bagua"):
        results = run_teams(3, unlike_steps, LocalSGD(communication_interval=8), (6, 5, 5))
    assert all(len(notices) == 1 and "(6 on rank 0; 5 on ranks 1, 2)" in notices[0] for notices in results)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and results[0][0] in warnings[0] and "bagua.join" in warnings[0]


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [(LocalSGD(communication_interval=8), (5, 5)), (AsyncModelAverage(), (6, 5)), ("bytegrad", (5, 5))],
)
def test_no_word_where_numbers_of_steps_are_alike_or_free(algorithm: Any, steps: Sequence[int]) -> None:
    assert run_teams(2, unlike_steps, algorithm, steps) == [(), ()]
