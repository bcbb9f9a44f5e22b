"""Rows: what users do around backward() and step()."""

from __future__ import annotations

import torch
from torch import nn

import bagua
from tests.parity.case import Case
from tests.parity.feature import Refused, feature
from tests.parity.model import STEPS, Small, batch, equal, loss_of, same_everywhere, train, weights

SECTION = "Training loop"
OWN = ("qadam", "one_bit_lamb", "zero_one_adam")


@feature(SECTION, "`zero_grad(set_to_none=False)`, and zeroing through the module")
def zero_grad(case: Case) -> None:
    """As the default, to the last bit."""
    model, optimizer = case.build()
    for step in range(STEPS):
        if step % 2:
            optimizer.zero_grad(set_to_none=False)
        else:
            model.zero_grad(set_to_none=step < 3)
        loss_of(model, step).backward()
        optimizer.step()
    case.check_same_run(model, exactly=True)


@feature(SECTION, "gradient clipping, by norm and by value")
def clipping(case: Case) -> None:
    """What is clipped is the mean gradient, or the local one where gradients are local; the clip is kept."""
    model, optimizer = case.build()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if case.shares_gradients and not (case.name == "zero_one_adam" and step >= 4):
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            assert same_everywhere(grads), "clipping would differ by rank"
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert norm > 0.01
        total = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert total < 0.0101
        nn.utils.clip_grad_value_(model.parameters(), 0.001)
        optimizer.step()
    case.check_agreement(model)


@feature(SECTION, "parameter groups")
def groups(case: Case) -> None:
    """A group with a learning rate of 0 stays."""
    torch.manual_seed(0)
    model = Small()
    optimizer = case.optimizer(
        [
            {"params": [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("last")]},
            {"params": list(model.last.parameters()), "lr": 0.0},
        ]
    )
    case.distribute(model, optimizer)
    train(model, optimizer)
    case.check_agreement(model)
    case.check_stayed(case.start(), weights(model), "last")


@feature(SECTION, "learning-rate schedulers")
def scheduler(case: Case) -> None:
    """A scheduler is what setting the learning rate by hand is."""
    found = []
    for by_hand in (True, False):
        model, optimizer = case.build()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(STEPS):
            train(model, optimizer, [step])
            if by_hand:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * 0.5 ** ((step + 1) // 2)
            else:
                schedule.step()
        found.append(weights(model))
        case.check_agreement(model)
        bagua.detach(model)
    assert equal(*found) or not case.synchronous


@feature(SECTION, "several optimizers for one module", refused=dict.fromkeys(OWN, "needs exactly one bagua.optim"))
def several_optimizers(case: Case) -> None:
    """As one optimizer, to the last bit."""
    torch.manual_seed(0)
    model = Small()
    last = {id(p) for p in model.last.parameters()}
    optimizers = [
        case.optimizer(p for p in case.params(model) if id(p) not in last),
        case.optimizer(p for p in case.params(model) if id(p) in last),
    ]
    try:
        case.distribute(model, optimizers)
    except ValueError as error:
        raise Refused(str(error)) from None
    train(model, optimizers)
    assert bagua.stats(model).steps == STEPS
    case.check_same_run(model, exactly=True)


@feature(SECTION, "two modules, two optimizers: a GAN")
def gan(case: Case) -> None:
    """Each backward pass belongs to one of them, though the generator's goes through the discriminator."""
    torch.manual_seed(0)
    generator, critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), nn.Linear(6, 1)
    first, second = case.optimizer(generator.parameters()), case.optimizer(critic.parameters())
    case.distribute(generator, first)
    case.distribute(critic, second)
    start = [weights(generator), weights(critic)]
    for step in range(STEPS):
        second.zero_grad()
        (critic(generator(batch(step)).detach()).mean() - critic(batch(step + 20)).mean()).tanh().backward()
        second.step()
        first.zero_grad()
        critic.requires_grad_(False)
        (-critic(generator(batch(step))).mean()).backward()
        critic.requires_grad_(True)
        first.step()
    for model, before in ((generator, start[0]), (critic, start[1])):
        assert bagua.stats(model).steps == STEPS
        assert not equal(weights(model), before)
        case.check_agreement(model)


@feature(SECTION, "one optimizer over two modules")
def one_optimizer(case: Case) -> None:
    """Two modules in one loss."""
    torch.manual_seed(0)
    encoder, decoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)
    optimizer = case.optimizer([*encoder.parameters(), *decoder.parameters()])
    case.distribute(encoder, optimizer)
    case.distribute(decoder, optimizer)
    both = nn.Sequential(encoder, decoder)
    before = weights(both)
    train(both, optimizer)
    for model in (encoder, decoder):
        assert bagua.stats(model).steps == STEPS
        case.check_agreement(model)
    assert all(not torch.equal(value, before[name]) for name, value in weights(both).items())
