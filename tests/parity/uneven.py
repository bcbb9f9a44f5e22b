"""Rows: uneven inputs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import bagua
from tests.parity.case import FEW, Case
from tests.parity.feature import NotApplicable, Refused, feature, says
from tests.parity.loop import OWN
from tests.parity.model import STEPS, Small, batch, distance, equal, loss_of, same_everywhere, target, train, weights
from tests.parity.statistics import Normed

SECTION = "Uneven inputs"
MOMENTA = dict.fromkeys(OWN, "it averages optimizer momenta, so every rank must make every step")


def refused(run: object) -> None:
    """Turn the library's refusal into a cell."""
    try:
        assert callable(run)
        run()
    except ValueError as error:
        raise Refused(str(error)) from None


@feature(SECTION, "`bagua.join`: ranks with different numbers of batches", refused=MOMENTA)
def join(case: Case) -> str | None:
    """The rank that goes on takes the others' gradients as zero; afterwards all ranks hold the same."""
    model, optimizer = case.build()
    mine = (3, STEPS)[dist.get_rank()]

    def loop() -> None:
        with bagua.join(model):
            train(model, optimizer, range(mine))

    refused(loop)
    if not case.synchronous:
        case.check_agreement(model)
        return "no rank waits for another anyway"
    assert bagua.stats(model).steps == STEPS
    if case.shares_gradients:
        assert same_everywhere(weights(model)), "weights differ after the join"
        assert same_everywhere(dict(model.named_buffers()))
        moments = {str(k): s["momentum_buffer"] for k, s in optimizer.state_dict()["state"].items()}
        assert same_everywhere(moments), "optimizer state differs after the join"
        # What the longer rank saw: after the third step the other's gradient is zero.
        other, twin = case.build()
        for step in range(STEPS):
            twin.zero_grad()
            alone = step >= 3 and dist.get_rank() == 0
            (loss_of(other, step) * (0.0 if alone else 1.0)).backward()
            twin.step()
        assert distance(weights(model), weights(other)) <= max(1e-5, case.slack) * distance(
            weights(other), case.start()
        )
        bagua.detach(other)
    train(model, optimizer, range(STEPS, STEPS + 2))  # both go on as ever
    assert bagua.stats(model).steps == STEPS + 2
    case.check_agreement(model)
    return None


@feature(
    SECTION,
    "join with accumulation, buffers broadcast, two modules, no batch at all on one rank",
    refused=MOMENTA,
    not_applicable={"async": "nothing to join"},
)
def join_more(case: Case) -> None:
    """Every kind of announcement."""
    if not case.synchronous:
        raise NotApplicable("nothing to join: no rank waits")
    model, first = case.build(Normed, broadcast_buffers=True)
    other, second = case.build(seed=1)
    steps = (0, 4)[1 - dist.get_rank()]  # rank 1 has none, rank 0 four

    def loop() -> None:
        with bagua.join([model, other]):
            for step in range(steps):
                first.zero_grad()
                second.zero_grad()
                with bagua.no_sync(model):
                    (model(batch(step)[:2]) - target(step)[:2]).square().mean().backward()
                (model(batch(step)) - target(step)).square().mean().backward()
                first.step()
                for part in (slice(0, 2), slice(2, 4)):  # two synchronised passes in one step
                    ((other(batch(step)[part]) - target(step)[part]).square().mean() / 2).backward()
                second.step()

    refused(loop)
    for each in (model, other):
        assert bagua.stats(each).steps == 4
        case.check_agreement(each)
    assert not equal(weights(model), case.start(Normed))
    if case.shares_gradients:
        assert same_everywhere(dict(model.named_buffers()))


@feature(
    SECTION,
    "join: gradients divided by the ranks that still have inputs (`divide_by_initial_world_size=False`)",
    refused=MOMENTA,
    not_applicable=dict.fromkeys(
        ("async", "decentralized", "diloco", "local_sgd", "low_precision_decentralized", "sparse_loco"), "weights"
    ),
    daily=FEW,
)
def join_divided(case: Case) -> None:
    """The rank that goes on trains with its own gradients."""
    model, optimizer = case.build()
    if not case.shares_gradients:
        if case.synchronous:
            with_false = lambda: bagua.join(model, divide_by_initial_world_size=False).__enter__()  # noqa: E731
            says(ValueError, case.name, "exchanges weights", run=with_false)
        raise NotApplicable("weights are averaged, not gradients")
    mine = (STEPS, 3)[dist.get_rank()]

    def loop() -> None:
        with bagua.join(model, divide_by_initial_world_size=False):
            train(model, optimizer, range(mine))

    refused(loop)
    assert same_everywhere(weights(model))
    other, twin = case.build()
    for step in range(STEPS):
        twin.zero_grad()
        alone = step >= 3
        (loss_of(other, step) * ((2.0, 0.0)[dist.get_rank()] if alone else 1.0)).backward()
        twin.step()
    assert distance(weights(model), weights(other)) <= max(1e-5, 3 * case.slack) * distance(
        weights(other), case.start()
    )


@feature(
    SECTION,
    "join: all ranks stop when one runs out (`throw_on_early_termination=True`)",
    refused={"async": "none learns when another runs out"},
    daily=FEW,
)
def join_early(case: Case) -> None:
    """An error on all ranks; synchronised batch norm is allowed with it only."""
    torch.manual_seed(0)
    model = bagua.nn.SyncBatchNorm.convert(Normed())
    optimizer = case.optimizer(model.parameters())
    case.distribute(model, optimizer)
    if case.synchronous and case.name not in OWN:
        says(ValueError, "'norm' needs a batch on every rank", run=lambda: bagua.join(model).__enter__())

    def loop() -> None:
        with bagua.join(model, throw_on_early_termination=True):
            train(model, optimizer, range((2, 4)[dist.get_rank()]))

    try:
        loop()
        raise AssertionError("no error")
    except ValueError as error:
        raise Refused(str(error)) from None
    except RuntimeError as error:
        assert "exhausted" in str(error), error  # noqa: PT017  (a refusal is no failure)
    assert bagua.stats(model).steps == 2
    case.distribute(model, optimizer)
    train(model, optimizer, range(2))
    case.check_agreement(model)


@feature(SECTION, "join of ranks that have as many batches as each other; `enable=False`", daily=FEW)
def join_even(case: Case) -> None:
    """Changes nothing."""
    if case.name in OWN:
        model, optimizer = case.build()
        with bagua.join(model, enable=False):
            train(model, optimizer)
        case.check_same_run(model, exactly=True)
        return
    for enable in (True, False):
        model, optimizer = case.build(Small)
        with bagua.join(model, enable=enable):
            train(model, optimizer)
        case.check_same_run(model, exactly=True)
        bagua.detach(model)
    assert isinstance(model, nn.Module)
