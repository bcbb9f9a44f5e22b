"""Post-accumulate hooks of the user's run before the bucket leaves, whenever they were registered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team
from tests.engine.training import batch, equal, seeded
from tests.rank_threads import run_teams

STEPS = 3


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def local_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


def seen_by_hooks(team: Team, when: str, set_to_none: bool) -> bool:
    """Whether hooks saw the local gradients in every step, and what they changed was averaged."""
    model, twin = seeded(make, 0).double(), seeded(make, 0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    seen: dict[int, Tensor] = {}

    def note(index: int) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            assert param.grad is not None
            seen[index] = param.grad.clone()
            param.grad.mul_(2)

        return hook

    def register() -> list:
        return [param.register_post_accumulate_grad_hook(note(i)) for i, param in enumerate(params)]

    handles = register() if when == "before" else []
    # Each bucket holds one parameter: it leaves in that parameter's own hook.
    bagua.distribute(model, optimizer, process_group=team, bucket_bytes=1)
    bagua.distribute(model, optimizer, process_group=team, bucket_bytes=1)
    handles += register() if when == "after" else []
    good = True
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        twin.load_state_dict(model.state_dict())
        every = [local_gradients(twin, batch(rank, step).double()) for rank in range(2)]
        loss = model(batch(team.rank, step).double()).square().mean()
        if when == "each pass":  # as many hooks as in the pass before, and new ones
            for handle in handles:
                handle.remove()
            handles = register()
        loss.backward()
        good &= all(equal(seen[index], grad) for index, grad in enumerate(every[team.rank]))
        for param, *grads in zip(params, *every, strict=True):
            good &= torch.allclose(param.grad, sum(grads), rtol=1e-12)  # pyright: ignore
        optimizer.step()
    for handle in handles:
        handle.remove()
    model(batch(team.rank, 9).double()).square().mean().backward()
    bagua.detach(model)
    return good and not any(param._post_accumulate_grad_hooks for param in params)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["before", "after", "each pass"])
def test_hooks_see_local_gradients(when: str, set_to_none: bool) -> None:
    assert run_teams(2, seen_by_hooks, when, set_to_none) == [True, True]
