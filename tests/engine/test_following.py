"""The engine follows the optimizers that step the module's parameters, whoever made them and whenever."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from bagua.algorithms import Decentralized, LocalSGD, Warmup
from bagua.comm.team import Team
from tests.algorithms.quadratic import Quadratic, flat, target
from tests.engine.test_bad_input import message_of
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams

LR = 0.1
WEIGHTS = ["decentralized", LocalSGD(communication_interval=2), "low_precision_decentralized"]
SGD = torch.optim.SGD


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(torch.tensor(target(rank, step), dtype=torch.float32))


def values(model: nn.Module) -> np.ndarray:
    return flat(model).detach().double().numpy().copy()


Make = Callable[[Quadratic, torch.optim.Optimizer], Callable[[int], None]]


def train(team: Team | None, algorithm: Any, make: Make | None, steps: int = 10) -> tuple[np.ndarray, int]:
    """Weights after `steps` steps; `make` returns what makes a step after the first three, None: the optimizer."""
    rank = dist.get_rank() if team is None else team.rank
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=LR)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    step_of: Callable[[int], None] = lambda _: optimizer.step()  # noqa: E731
    for step in range(steps):
        if step == 3 and make is not None:
            step_of = make(model, optimizer)
            del optimizer
            gc.collect()
        model.zero_grad()
        loss_of(model, rank, step).backward()
        step_of(step)
    loss_of(model, rank, steps)  # where an optimizer did not step, this forward pass tells that the step is over
    found, count = values(model), bagua.stats(model).steps
    bagua.detach(model)
    return found, count


def a_new_one(model: Quadratic, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    new = SGD(model.parameters(), lr=LR)
    return lambda _: new.step()


def a_new_one_beside(model: Quadratic, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    """The old one lives on."""
    made = [SGD(model.parameters(), lr=LR), optimizer]
    return lambda _: made[0].step()


def one_for_each(model: Quadratic, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    new = [SGD([param], lr=LR) for param in model.parameters()]

    def step_of(_: int) -> None:
        for each in new:
            each.step()

    return step_of


def to_and_fro(model: Quadratic, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    new = SGD(model.parameters(), lr=LR)
    return lambda step: (new if step % 3 else optimizer).step()


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, as SAM does."""

    def __init__(self, params: Iterable[Tensor], base: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(params, options)
        self.base = base(self.param_groups, **options)

    def step(self, closure: Any = None) -> None:
        self.base.step()


def a_wrapper(model: Quadratic, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    new = Wrapper(model.parameters(), SGD, lr=LR)
    return lambda _: new.step()


def a_wrappers_base(model: Quadratic, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    new = Wrapper(model.parameters(), SGD, lr=LR)
    return lambda _: new.base.step()


class OfSGD(torch.optim.SGD):
    """Its step and its base class's run hooks, one within the other."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def a_subclass(model: Quadratic, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    new = OfSGD(model.parameters(), lr=LR)
    return lambda _: new.step()


MAKES = [a_new_one, a_new_one_beside, one_for_each, to_and_fro, a_wrapper, a_wrappers_base, a_subclass]


def each(algorithm: Any) -> list[tuple[np.ndarray, int]]:
    return [train(None, algorithm, make) for make in [None, *MAKES]]


@pytest.mark.parametrize("algorithm", [*WEIGHTS, Warmup(5, "gradient_allreduce", "decentralized")], ids=str)
def test_other_optimizers_are_followed(pool: RankPool, algorithm: Any) -> None:
    for (want, steps), *others in pool.run(2, each, algorithm):
        assert steps == 10
        for make, (found, count) in zip(MAKES, others, strict=True):
            assert count == 10 and np.array_equal(found, want), make.__name__


def sharpness_aware(team: Team, given: str, algorithm: Any) -> tuple[np.ndarray, int]:
    """Two passes a step, weights moved away and back between them, in place."""
    model = Quadratic()
    sam = Wrapper(model.parameters(), SGD, lr=LR)
    bagua.distribute(model, sam if given == "wrapper" else sam.base, algorithm, process_group=team)
    for step in range(8):
        model.zero_grad()
        loss_of(model, team.rank, step).backward()
        with torch.no_grad():
            away = [0.05 * param.grad for param in model.parameters()]
            torch._foreach_add_(list(model.parameters()), away)
        model.zero_grad()
        loss_of(model, team.rank, step).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), away)
        sam.base.step()
    found = values(model), bagua.stats(model).steps
    bagua.detach(model)
    return found


@pytest.mark.parametrize("given", ["wrapper", "base"])
def test_sharpness_aware_minimisation(given: str) -> None:
    for rank, (found, steps) in enumerate(run_teams(2, sharpness_aware, given, "decentralized")):
        assert steps == 8
        x = np.stack([values(Quadratic())] * 2)
        for step in range(8):
            t = np.stack([target(each, step) for each in range(2)])
            x = x.mean(0) - LR * (x + 0.05 * (x - t) - t)
        assert np.abs(found - x[rank]).max() < 1e-5


def by_hand(team: Team, algorithm: Any, change: str, optimizers: str = "given") -> tuple[str, int]:
    """Steps without an optimizer."""
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=LR)
    bagua.distribute(model, [optimizer] if optimizers == "given" else [], algorithm, process_group=team)

    def loop() -> None:
        for step in range(40):
            model.zero_grad()
            loss_of(model, team.rank, step).backward()
            for param in model.parameters():
                if change == "data":
                    param.data.sub_(LR * param.grad)
                else:
                    with torch.no_grad():
                        param.sub_(LR * param.grad)

    found = message_of(loop), bagua.stats(model).steps
    bagua.detach(model)
    return found


@pytest.mark.parametrize("change", ["in place", "data"])
@pytest.mark.parametrize("algorithm", ["decentralized", Warmup(5, "gradient_allreduce", "local_sgd")], ids=str)
def test_weights_that_change_without_a_step_are_told(algorithm: Any, change: str) -> None:
    for message, steps in run_teams(2, by_hand, algorithm, change):
        assert message.startswith("RuntimeError: the parameters changed before 16 backward passes in a row and no")
        assert steps == 0


@pytest.mark.parametrize("algorithm", ["local_sgd", "gradient_allreduce"])
def test_without_optimizers_each_pass_is_a_step(algorithm: str) -> None:
    for message, steps in run_teams(2, by_hand, algorithm, "in place", "none"):
        assert message == "no error" and steps == 40


OVERWRITTEN = "overwrite the averages, and each rank trains alone"


def with_masters(team: Team, algorithm: Any, late: bool) -> list[int]:
    """How many notices there are that averages are overwritten, after each step.

    Masters in higher precision are stepped and copied into the module; if `late`, an optimizer of the module itself.
    """
    model = Quadratic()
    bagua.distribute(model, [], algorithm, process_group=team)
    masters = [param.detach().double() for param in model.parameters()]
    optimizer = SGD(list(model.parameters()) if late else masters, lr=LR)
    found = list[int]()
    for step in range(4):
        model.zero_grad()
        loss_of(model, team.rank, step).backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = None if param.grad is None else param.grad.double()
        optimizer.step()
        if not late:
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), masters)
        found.append(sum(OVERWRITTEN in each for each in bagua.stats(model).notices))
    bagua.detach(model)
    return found


@pytest.mark.parametrize(
    ("algorithm", "late", "told"),
    [
        ("local_sgd", False, [0, 1, 1, 1]),
        ("decentralized", False, [0, 1, 1, 1]),
        (Warmup(2, "gradient_allreduce", "local_sgd"), False, [0, 0, 1, 1]),
        ("bytegrad", False, [0, 0, 0, 0]),
        ("local_sgd", True, [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_averages_that_copies_of_weights_can_overwrite(
    algorithm: Any, late: bool, told: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "bagua"):
        assert run_teams(2, with_masters, algorithm, late) == [told] * 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [OVERWRITTEN in each for each in warnings] == [True] * told[-1], "one rank warns"
    if told[-1]:
        assert "fp32 master copies" in warnings[0] and "optimizers=[]" in warnings[0]


def test_a_rank_alone_overwrites_no_averages() -> None:
    assert run_teams(1, with_masters, "local_sgd", False) == [[0, 0, 0, 0]]


def legal(team: Team) -> int:
    """What must never be taken for a step, or for a lack of steps."""
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=LR)
    bagua.distribute(model, optimizer, "local_sgd", process_group=team)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = nn.Linear(2, 2)
    elsewhere = SGD(other.parameters(), lr=LR)
    for step in range(3):
        model.zero_grad()
        for _ in range(40):  # accumulation without no_sync
            loss_of(model, team.rank, step).backward()
        elsewhere.step()  # of other parameters
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-3, 3)
        model.load_state_dict(state)
    for step in range(40):  # every step skipped, as by a GradScaler
        model.zero_grad()
        loss_of(model, team.rank, step).backward()
    optimizer.step()
    steps = bagua.stats(model).steps
    bagua.detach(model)
    return steps


def test_legal_loops_are_left_alone() -> None:
    assert run_teams(2, legal) == [4, 4]


def within_backward(team: Team, algorithm: str, how: str) -> str:
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=LR)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    if how == "torch":
        # Here, since the package warns of what it is made of.
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": LR})
        return message_of(lambda: loss_of(model, team.rank, 0).backward())
    steppers = {param: SGD([param], lr=LR) for param in model.parameters()}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: steppers[param].step())
    return message_of(lambda: loss_of(model, team.rank, 0).backward())


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("how", ["torch", "by hand"])
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
def test_steps_within_backward_are_refused(algorithm: str, how: str) -> None:
    for message in run_teams(2, within_backward, algorithm, how):
        assert message.startswith("RuntimeError: SGD steps within the backward pass, before gradients")


def foreign_to_qadam(team: Team) -> str:
    model = Quadratic()
    given = bagua.optim.QAdam(model.parameters(), warmup_steps=2)
    bagua.distribute(model, given, "qadam", process_group=team)
    loss_of(model, team.rank, 0).backward()
    given.step()
    return message_of(SGD(model.parameters(), lr=LR).step)


def test_an_algorithm_with_an_optimizer_of_its_own_refuses_others() -> None:
    for message in run_teams(2, foreign_to_qadam):
        assert message.startswith("RuntimeError: SGD was not given to bagua.distribute() and steps with the module's")
        assert "'qadam' needs exactly one bagua.optim.QAdam" in message


def scaled(team: Team) -> list[list[float]]:
    """A scaler with an optimizer whose first step it is; rank 1 overflows."""
    model = Quadratic()
    given = SGD(model.parameters(), lr=LR)
    bagua.distribute(model, given, "local_sgd", process_group=team)
    scaler = bagua.GradScaler("cpu", init_scale=8.0)
    new, scales = SGD(model.parameters(), lr=LR), []
    for step in range(2):
        new.zero_grad()
        loss = loss_of(model, team.rank, step)
        scaler.scale(loss * float("inf") if (team.rank, step) == (1, 0) else loss).backward()
        scaler.step(new)
        scaler.update()
        scales.append(scaler.get_scale())
    steps = bagua.stats(model).steps
    bagua.detach(model)
    return [scales, [steps]]


def test_a_scaler_knows_a_new_optimizer() -> None:
    assert run_teams(2, scaled) == [[[4.0, 4.0], [1]]] * 2


def hooks_left(team: Team) -> tuple[int, int]:
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=LR)
    bagua.distribute(model, optimizer, Decentralized(), process_group=team)
    new = SGD(model.parameters(), lr=LR)
    loss_of(model, team.rank, 0).backward()
    new.step()
    old = len(optimizer._optimizer_step_pre_hooks)
    bagua.detach(model)
    return old, len(new._optimizer_step_pre_hooks) + len(new._optimizer_step_post_hooks)


def test_no_hook_is_left() -> None:
    assert run_teams(2, hooks_left) == [(0, 0), (0, 0)]
