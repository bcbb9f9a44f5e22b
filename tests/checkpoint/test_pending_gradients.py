"""A state that is taken before an optimizer has applied the gradients says that they are not in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import bagua
from bagua.comm.team import Team
from tests.rank_threads import run_teams

TEXT = "gradients that no optimizer has applied yet are not saved"
ALGORITHMS = ["gradient_allreduce", "bytegrad", "local_sgd"]


class Loop:
    """A training whose steps a test writes one by one."""

    def __init__(self, team: Team, algorithm: Any, count: int = 1) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        parts: Sequence[torch.nn.Module] = [self.model] if count == 1 else list(self.model)
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
        bagua.distribute(self.model, self.optimizers if count else [], algorithm, process_group=team)

    def backward(self, *, local: bool = False, scale: float = 1.0) -> None:
        """A backward pass."""
        loss = scale * self.model(torch.ones(2, 3)).square().mean()
        if local:
            with bagua.no_sync(self.model):
                loss.backward()
        else:
            loss.backward()

    @property
    def told(self) -> bool:
        """Whether a state that is taken now says it; as each says it once, in another training each time."""
        bagua.state_dict(self.model)
        return any(TEXT in each for each in bagua.stats(self.model).notices)

    def close(self) -> None:
        """End the training."""
        bagua.detach(self.model)


def before_a_step(team: Team, algorithm: Any, how: str) -> list[bool]:
    loop = Loop(team, algorithm)
    found = [loop.told]
    for _ in range(2):
        loop.backward()
        loop.optimizers[0].step()
        found.append(loop.told)  # with the gradients of this step
        loop.optimizers[0].zero_grad()
        found.append(loop.told)
    loop.backward(local=how == "accumulation")
    found.append(loop.told)
    loop.close()
    return found


@pytest.mark.parametrize("how", ["backward", "accumulation"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_that_wait_for_a_step_are_told_of(algorithm: str, how: str) -> None:
    assert run_teams(2, before_a_step, algorithm, how) == [[False] * 5 + [True]] * 2


def two_frequencies(team: Team, algorithm: Any) -> list[bool]:
    loop, found = Loop(team, algorithm, count=2), list[bool]()
    often, seldom = loop.optimizers
    for step in range(4):
        loop.backward()
        often.step()
        found.append(loop.told)
        if step % 2:
            seldom.step()
            found.append(loop.told)
        loop.model.zero_grad()
        found.append(loop.told)
    loop.close()
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_of_two_optimizers_has_stepped(algorithm: str) -> None:
    assert run_teams(2, two_frequencies, algorithm) == [[False] * 10] * 2


def without_pending(team: Team, how: str) -> bool:
    loop = Loop(team, "gradient_allreduce", count=0 if how == "optimizers=[]" else 1)
    loop.backward(scale=float("inf") if how == "skipped" else 1.0)
    if how == "thrown away":
        loop.model.zero_grad()
    elif how == "evaluation":
        loop.optimizers[0].step()
        loop.model(torch.ones(2, 3))
    elif how == "a discriminator's":
        for _ in range(2):  # its own pass, and the generator's, whose gradients are still there
            loop.model.zero_grad()
            loop.backward()
            loop.optimizers[0].step()
            loop.backward()
    elif how == "local steps":
        for _ in range(2):
            loop.backward(local=True)
            loop.optimizers[0].step()
    found = loop.told
    loop.close()
    return found


@pytest.mark.parametrize(
    "how", ["optimizers=[]", "thrown away", "skipped", "evaluation", "local steps", "a discriminator's"]
)
def test_gradients_that_no_step_is_to_use(how: str) -> None:
    assert run_teams(2, without_pending, how) == [False, False]
