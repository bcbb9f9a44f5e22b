"""Rows: accumulation, and passes that are no steps."""

from __future__ import annotations

import torch

import bagua
from tests.parity.case import Case
from tests.parity.feature import feature
from tests.parity.model import Small, batch, distance, equal, loss_of, target, train, weights

SECTION = "Accumulation"


@feature(SECTION, "gradient accumulation with `no_sync`")
def no_sync(case: Case) -> None:
    """Two halves of a batch, the first within no_sync, are the batch."""
    model, optimizer = case.build()

    def halves(step: int) -> None:
        for part in (slice(0, 2), slice(2, 4)):
            loss = (model(batch(step)[part]) - target(step)[part]).square().mean() / 2
            if part.start == 0:
                with bagua.no_sync(model):
                    before = bagua.stats(model).total.launches
                    loss.backward()
                    assert bagua.stats(model).total.launches == before or not case.shares_gradients
            else:
                loss.backward()

    train(model, optimizer, backward=halves)
    case.check_same_run(model)


@feature(SECTION, "several backward passes before a step")
def several_backwards(case: Case) -> None:
    """Every pass is synchronised; means of means are means."""
    model, optimizer = case.build()

    def halves(step: int) -> None:
        for part in (slice(0, 2), slice(2, 4)):
            ((model(batch(step)[part]) - target(step)[part]).square().mean() / 2).backward()

    train(model, optimizer, backward=halves)
    # A lossy exchange loses twice here, and residuals are fed back earlier.
    if case.slack < 1e-3:
        case.check_same_run(model)
    else:
        case.check_agreement(model)
        assert distance(weights(model), case.start()) < 3 * distance(case.plain(), case.start())


@feature(SECTION, "forward passes without a backward pass, evaluation between steps")
def other_forwards(case: Case) -> None:
    """They change nothing and do not communicate out of turn."""
    model, optimizer = case.build()

    def backward(step: int) -> None:
        model(batch(step + 50))
        model.eval()
        with torch.no_grad():
            first = model(batch(step))
            assert torch.equal(first, model(batch(step)))
        model.train()
        with torch.no_grad():
            model(batch(step))
        loss_of(model, step).backward()
        model.eval()
        if step % 2:
            model(batch(step))
        model.train()

    train(model, optimizer, backward=backward)
    case.check_same_run(model, exactly=True)


@feature(SECTION, "two forward passes, one backward pass of their sum; one forward pass, two backward passes")
def many_to_one(case: Case) -> None:
    """Neither confuses the count of passes."""
    model, optimizer = case.build()

    def backward(step: int) -> None:
        first = (model(batch(step)[:2]) - target(step)[:2]).square().mean()
        second = (model(batch(step)[2:]) - target(step)[2:]).square().mean()
        if step % 2:
            ((first + second) / 2).backward()
        else:
            whole = (first + second) / 2
            with bagua.no_sync(model):
                (whole * 0.5).backward(retain_graph=True)
            (whole * 0.5).backward()

    train(model, optimizer, backward=backward)
    case.check_same_run(model)


@feature(SECTION, "a step that is broken off by an exception and made again")
def broken_off(case: Case) -> None:
    """An exception in the loss, before the backward pass, on all ranks."""
    model, optimizer = case.build()

    def backward(step: int) -> None:
        try:
            model(batch(step))
            raise KeyError("the user's own")
        except KeyError:
            loss_of(model, step).backward()

    train(model, optimizer, backward=backward)
    case.check_same_run(model, exactly=True)
    assert isinstance(model, Small) and not equal(weights(model), case.start())
