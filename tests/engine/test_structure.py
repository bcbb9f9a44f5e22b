"""A module whose parameters are replaced after distribute, or that torch's wrappers hold too, is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import bagua
from tests.engine.test_bad_input import message_of
from tests.engine.training import batch, seeded
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 3))


def replace_layer(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model[4] = nn.Linear(5, 3)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def replace_nested(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model.get_submodule("2.0").weight = nn.Parameter(torch.zeros(5, 5))
    return torch.optim.SGD(model.parameters(), lr=0.1)


def assign(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def add_head(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": model[5].parameters()})
    return optimizer


def parametrize(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    parametrizations.weight_norm(model[0])
    return torch.optim.SGD(model.parameters(), lr=0.1)


def past_torch(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As fully_shard does."""
    model[4]._parameters["bias"] = nn.Parameter(torch.zeros(3))
    return optimizer


CHANGES: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "layer": (replace_layer, "4.weight"),
    "nested": (replace_nested, "2.0.weight"),
    "assign": (assign, "0.weight"),
    "head": (add_head, "5.weight"),
    "parametrization": (parametrize, "0.parametrizations.weight.original0"),
    "past torch": (past_torch, "4.bias"),
}


def changed(team: object, algorithm: str) -> dict[str, str]:
    found = {}
    for name, (change, _) in CHANGES.items():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, algorithm, process_group=team)
        x = torch.ones(2, 6)
        model(x).sum().backward()
        optimizer.step()
        optimizer = change(model, optimizer)
        found[name] = message_of(lambda model=model, x=x: model(x))
        # What the message asks for works.
        bagua.distribute(model, optimizer, algorithm, process_group=team)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        bagua.detach(model)
    return found


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
def test_replaced_and_added_parameters_are_named_at_the_next_forward(algorithm: str) -> None:
    for found in run_teams(2, changed, algorithm):
        for name, (_, param) in CHANGES.items():
            assert found[name].startswith(f"RuntimeError: parameter '{param}' was added or replaced"), (name, found)


def legal(team: object) -> None:
    """Changes that leave the trained parameters what they are."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, process_group=team)
    for step in range(6):
        if step == 1:
            model[1] = nn.ReLU()  # no parameters
        elif step == 2:
            model.append(nn.Linear(3, 3).requires_grad_(False))
        elif step == 3:
            _ = [nn.Linear(2, 2) for _ in range(3)]  # other modules, elsewhere
        elif step == 4:
            for param in model.parameters():
                param.data = param.data.clamp(-0.5, 0.5)  # gradients are exchanged: weights may lie anywhere
        elif step == 5:
            del model[4:]  # count as unused
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        averages: dict[str, torch.Tensor] = {
            name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()
        }
        torch.func.functional_call(model, averages, torch.ones(2, 6))
        optimizer.step()


def test_other_changes_are_legal() -> None:
    run_teams(2, legal)


def new_storage(team: object) -> str:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, "local_sgd", process_group=team)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    model.get_parameter("2.0.bias").data = torch.zeros(5)
    return message_of(lambda: model(torch.ones(2, 6)))


def test_new_storage_is_named_at_the_next_forward() -> None:
    for message in run_teams(2, new_storage):
        assert message.startswith("RuntimeError: parameter '2.0.bias' was converted, moved or given other storage")


def shard(module: nn.Module) -> None:
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def fsdp_replicas(module: nn.Module) -> None:
    replicate_by_fsdp(module, mesh=init_device_mesh("cpu", (2,)))


def ddp_replicas(module: nn.Module) -> None:
    replicate_by_ddp(module)


# The earlier replicate() makes its DDP in the first forward pass.
WRAPPERS = {"fully_shard()": [shard], "replicate()": [fsdp_replicas, ddp_replicas]}
CALLS = [pytest.param(call, name, id=call.__name__) for name, calls in WRAPPERS.items() for call in calls]


def given_to_torch(call: Callable[[nn.Module], None]) -> list[str]:
    inside, around, part = (seeded(small, 0) for _ in range(3))
    call(inside)
    before = message_of(lambda: bagua.distribute(inside, torch.optim.SGD(inside.parameters(), lr=0.1)))
    bagua.distribute(around, torch.optim.SGD(around.parameters(), lr=0.1))
    call(around)
    after = message_of(lambda: around(batch(0, 0)))
    again = message_of(lambda: around(batch(0, 0)))
    bagua.distribute(part, torch.optim.SGD(part.parameters(), lr=0.1))
    call(part.get_submodule("0"))
    inner = message_of(lambda: [part(batch(0, 0)).sum().backward() for _ in range(2)])
    return [before, after, again, inner]


@pytest.mark.parametrize(("call", "name"), CALLS)
def test_composable_wrappers_are_refused(pool: RankPool, call: Callable[[nn.Module], None], name: str) -> None:
    reason = f"was given to torch's {name}"
    for before, after, again, inner in pool.run(2, given_to_torch, call):
        assert before.startswith(f"ValueError: module: it {reason}, which exchanges gradients itself; use one of the")
        assert after.startswith(f"RuntimeError: module: it {reason} after bagua.distribute(), which exchanges")
        assert again == after
        assert inner.startswith(f"RuntimeError: module: its part '0' {reason} after bagua.distribute(), which")


def wrapped() -> list[str]:
    model = seeded(small, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside = message_of(lambda: bagua.distribute(DistributedDataParallel(model), optimizer))
    part = message_of(lambda: bagua.distribute(nn.Sequential(DistributedDataParallel(small())), optimizer))
    bagua.distribute(model, optimizer)
    outer = DistributedDataParallel(model)
    around = message_of(lambda: outer(batch(0, 0)))
    # Beside a DDP module that does not hold it, a distributed module is welcome.
    other = nn.Linear(6, 6)
    other.register_forward_hook(lambda *_: model(batch(0, 0)))
    beside = message_of(lambda: DistributedDataParallel(other)(batch(0, 0)).sum().backward())
    return [inside, part, around, beside]


def test_ddp_around_and_within_is_refused(pool: RankPool) -> None:
    for inside, part, around, beside in pool.run(2, wrapped):
        assert inside.startswith("ValueError: module: it is a torch DistributedDataParallel, which exchanges")
        assert part.startswith("ValueError: module: its part '0' is a torch DistributedDataParallel")
        assert around.startswith("RuntimeError: Sequential is distributed by Bagua and wrapped in torch's Distributed")
        assert beside == "no error"
