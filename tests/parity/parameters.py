"""Rows: which parameters get a gradient, and when."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import bagua
from tests.parity.case import Case
from tests.parity.feature import Refused, feature, says
from tests.parity.model import (
    STEPS,
    Branches,
    Small,
    batch,
    equal,
    loss_of,
    mean_everywhere,
    same_everywhere,
    target,
    train,
    weights,
)

SECTION = "Parameters"


@feature(SECTION, "root-level, tied and frozen parameters")
def all_kinds(case: Case) -> None:
    """Root-level ones move, tied ones stay tied, frozen ones stay."""
    model, optimizer = case.build()
    assert isinstance(model, Small)
    train(model, optimizer)
    start = case.start()
    assert model.tied.weight is model.middle[0].weight
    assert torch.equal(model.frozen.weight, start["frozen.weight"])
    moved = {name for name, value in weights(model).items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if not name.startswith("frozen.")}
    case.check_same_run(model, exactly=True)


@feature(SECTION, "parameters that no rank uses, ever")
def never_used(case: Case) -> None:
    """They stay as they are; the others are trained as if they were not there."""
    model, optimizer = case.build(Branches)
    assert isinstance(model, Branches)
    start = weights(model)
    train(model, optimizer, backward=lambda step: loss_of(model, step, [0, 2]).backward())
    assert model.branches[1].weight.grad is None
    case.check_agreement(model)
    case.check_stayed(start, weights(model), "branches.1")


@feature(SECTION, "other parameters on each rank, others in each step")
def used_sets_change(case: Case) -> None:
    """A parameter that one rank of two uses gets half its gradient on both; nothing stalls."""
    schedule = [[[0, 1, 2]] * 2, [[0], [1]], [[1, 2], [0]], [[2], [2]], [[0, 1], [0, 1, 2]], [[0, 1, 2], [1]]]
    model, optimizer = case.build(Branches)
    assert isinstance(model, Branches)
    rank = dist.get_rank()
    for step, use in enumerate(schedule):
        optimizer.zero_grad()
        with bagua.no_sync(model):
            loss_of(model, step, use[rank]).backward()
        local = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }
        optimizer.zero_grad()
        loss_of(model, step, use[rank]).backward()
        for name, param in model.named_parameters():
            index = int(name.split(".")[1])
            anyone = any(index in used for used in use) if case.shares_gradients else index in use[rank]
            local_step = case.name == "zero_one_adam" and step >= 4
            if not local_step:
                assert (param.grad is not None) == anyone, (step, name)
        if case.name == "gradient_allreduce":
            for name, mean in mean_everywhere(local).items():
                grad = model.get_parameter(name).grad
                assert grad is None or torch.allclose(grad.double(), mean, atol=1e-6)
        optimizer.step()
    case.check_agreement(model)


@feature(SECTION, "a rank whose loss uses no parameter at all")
def rank_without_any(case: Case) -> None:
    """Its backward pass still takes part."""
    model, optimizer = case.build(Branches)

    def backward(step: int) -> None:
        if dist.get_rank() == step % 2:
            loss_of(model, step, [0, 1, 2]).backward()
        else:
            # The output depends on the input only, as when every expert is elsewhere.
            x = torch.ones(2, 6, requires_grad=True)
            (model(x, [0]) * 0 if not case.shares_gradients else model(x, [1])).sum().backward()

    train(model, optimizer, backward=backward)
    case.check_agreement(model)


@feature(SECTION, "parameters frozen in mid-training")
def freeze_later(case: Case) -> str | None:
    """They stay where they are; the rest goes on."""
    model, optimizer = case.build(Branches)
    assert isinstance(model, Branches)
    train(model, optimizer, range(STEPS), lambda step: loss_of(model, step, [0, 1, 2]).backward())
    case.check_agreement(model)
    optimizer.zero_grad()
    model.branches[1].requires_grad_(False)
    owed = "what its error feedback still owes them"
    debts = {"async": owed, "diloco": "its outer momentum", "sparse_loco": owed, "zero_one_adam": owed}
    debt = debts.get(case.name)
    remark = f"after another `distribute()`: {debt} would move them on" if debt else None
    if remark:
        case.distribute(model, optimizer)
    before = weights(model)
    train(model, optimizer, range(STEPS, 2 * STEPS), lambda step: loss_of(model, step, [0, 1, 2]).backward())
    case.check_agreement(model)
    case.check_stayed(before, weights(model), "branches.1")
    return remark


@feature(SECTION, "frozen parameters unfrozen in mid-training: an error, until `distribute` is called again")
def unfreeze(case: Case) -> None:
    """Silent divergence is what DDP offers here."""
    model, optimizer = case.build()
    assert isinstance(model, Small)
    train(model, optimizer)
    model.frozen.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.frozen.parameters())})
    says(RuntimeError, "'frozen.weight' was frozen", "call bagua.distribute() again", run=lambda: loss_of(model, 0))
    case.distribute(model, optimizer)
    train(model, optimizer, range(STEPS, 2 * STEPS))
    assert not torch.equal(model.frozen.weight, case.start()["frozen.weight"])
    case.check_agreement(model)


@feature(
    SECTION,
    "parameters added to an optimizer after `distribute`",
    refused=dict.fromkeys(("qadam", "one_bit_lamb", "zero_one_adam"), "needs all trainable parameters in its"),
)
def added_to_optimizer(case: Case) -> None:
    """All trainable parameters are exchanged, whether an optimizer holds them yet or not."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = case.optimizer(model.branches[0].parameters())
    try:
        case.distribute(model, optimizer)
    except ValueError as error:
        raise Refused(str(error)) from None
    before = weights(model)
    train(model, optimizer, range(3), lambda step: loss_of(model, step, [0, 1, 2]).backward())
    case.check_agreement(model)
    middle = weights(model)
    case.check_stayed(before, middle, "branches.1")
    optimizer.add_param_group({"params": list(model.branches[1].parameters())})
    model.zero_grad()
    train(model, optimizer, range(3, 9), lambda step: loss_of(model, step, [0, 1, 2]).backward())
    case.check_agreement(model)
    case.check_stayed(middle, weights(model), "branches.2")
    assert not equal({"w": model.branches[1].weight}, {"w": middle["branches.1.weight"]})


@feature(SECTION, "parameters and buffers that torch's `_ddp_params_and_buffers_to_ignore` names stay each rank's own")
def ignored(case: Case) -> None:
    """Neither made equal nor exchanged; the optimizer may hold them."""
    torch.manual_seed(dist.get_rank())
    model = Small()
    model._ddp_params_and_buffers_to_ignore = ["last.weight", "last.bias", "seen"]  # pyright: ignore
    optimizer = case.optimizer(case.params(model))
    case.distribute(model, optimizer)
    assert not same_everywhere({"w": model.last.weight})
    train(model, optimizer)
    if not case.shares_gradients:
        bagua.average_parameters(model)
    after = weights(model)
    mine = {name: after.pop(name) for name in ("last.weight", "last.bias")}
    assert same_everywhere(after) and not same_everywhere(mine)


class Outputs(NamedTuple):
    """As users return them."""

    first: torch.Tensor
    more: list[dict[str, torch.Tensor | None]]


class Nested(nn.Module):
    """Tensors deep within the output, one of them without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> Outputs:
        return Outputs(self.parts[0](x), [{"second": self.parts[1](x), "fixed": x.detach(), "none": None}])


@feature(SECTION, "outputs of nested types, of which the loss takes some; outputs without a gradient")
def nested_outputs(case: Case) -> None:
    """Named tuples, lists, dicts; also in a pass that uses no output of this module."""
    model, optimizer = case.build(Nested)
    start = weights(model)

    def backward(step: int) -> None:
        out = model(batch(step))
        second = out.more[0]["second"]
        assert second is not None
        ((out.first if step % 2 else second) - target(step)).square().mean().backward()

    train(model, optimizer, backward=backward)
    case.check_agreement(model)
    assert not any(torch.equal(value, start[name]) for name, value in weights(model).items())
