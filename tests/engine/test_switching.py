"""A switch that cannot be made leaves the module distributed as before; one that fails on a plain module, plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua
from bagua.algorithms import DiLoCo
from tests.engine.eight_bit import SGD8, Codes, Flat, momenta
from tests.engine.training import Net, distributed, equal, gradients, seeded, train, values
from tests.rank_pool import RankPool

TOO_MANY = DiLoCo(communication_interval=100, fragments=100)


def refused(algorithm: str) -> None:
    """Refused when the engine is made, after weights and optimizer state have been replicated."""
    model, optimizer = distributed(Net, algorithm)
    other, plain = distributed(Net, algorithm)
    for each, with_ in ((model, optimizer), (other, plain)):
        train(each, with_, range(2))
        bagua.average_parameters(each)
    before, grads = values(model), gradients(model)
    places = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(ValueError, match="fragments=100, but the parameters fill"):
        bagua.distribute(model, optimizer, TOO_MANY)
    parameters = {name for name, _ in model.named_parameters()}
    now = values(model)
    assert equal({name: before[name] for name in parameters}, {name: now[name] for name in parameters})
    assert equal(grads, gradients(model))
    if algorithm != "bytegrad":  # whose buckets hold no parameters
        assert places == [param.data_ptr() for param in model.parameters()]
    assert bagua.stats(model).algorithm == bagua.stats(other).algorithm and bagua.stats(model).steps == 2
    train(model, optimizer, range(2, 5))
    train(other, plain, range(2, 5))
    now, then = values(model), values(other)
    if algorithm == "bytegrad":  # else the optimizers' state has become the same on all ranks
        assert equal({name: now[name] for name in parameters}, {name: then[name] for name in parameters})
    assert bagua.stats(model).steps == 5
    bagua.distribute(model, optimizer, "gradient_allreduce")
    train(model, optimizer, range(5, 6))


@pytest.mark.parametrize("algorithm", ["bytegrad", "local_sgd", "async"])
def test_a_refused_switch_leaves_the_module_as_it_was(pool: RankPool, algorithm: str) -> None:
    pool.run(2, refused, algorithm)


def refused_at_first() -> None:
    model = seeded(Net, 0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    with pytest.raises(ValueError, match="fragments=100"):
        bagua.distribute(model, optimizer, TOO_MANY)
    assert equal(values(model), values(seeded(Net, 0)))
    assert all(param.untyped_storage().nbytes() == param.nbytes for param in model.parameters())
    assert not model._forward_pre_hooks and not optimizer._optimizer_step_post_hooks
    with pytest.raises(ValueError, match="not distributed"):
        bagua.stats(model)
    train(bagua.distribute(model, optimizer, "diloco"), optimizer, range(2))


def test_a_refused_start_leaves_a_plain_module(pool: RankPool) -> None:
    pool.run(2, refused_at_first)


def of_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def eight_bits(algorithms: Sequence[Any]) -> None:
    """State that is made of tensors goes through a switch and a hand-over; it becomes rank 0's."""
    model = seeded(Net, dist.get_rank())
    optimizer = SGD8([p for p in model.parameters() if p.requires_grad], Flat)
    for turn, algorithm in enumerate(algorithms):
        before = of_all(momenta(optimizer))
        bagua.distribute(model, optimizer, algorithm)
        assert equal(momenta(optimizer), before[0])
        train(model, optimizer, range(3 * turn, 3 * turn + 3))
        assert all(isinstance(slot["momentum"], Flat) for slot in optimizer.state.values())
    after = of_all([momenta(optimizer), [param.detach().clone() for param in model.parameters()]])
    assert equal(after[0], after[1])


def test_a_switch_with_8_bit_optimizer_state(pool: RankPool) -> None:
    handing_over = bagua.algorithms.Warmup(1, "local_sgd", "gradient_allreduce")
    pool.run(2, eight_bits, ["bytegrad", "local_sgd", "gradient_allreduce", handing_over])


def opaque() -> tuple[str, str]:
    """What cannot be taken apart, or is on one rank only, is refused before anything changes."""
    messages = []
    for kind, error in ((Codes, ValueError), (Flat, bagua.RankMismatchError)):
        model = seeded(Net, 0)
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = SGD8(params, kind)
        bagua.distribute(model, optimizer, "local_sgd")
        train(model, optimizer, range(2))
        if kind is Flat and dist.get_rank() == 1:
            del optimizer.state[params[0]]
        before = values(model)
        with pytest.raises(error) as caught:
            bagua.distribute(model, optimizer, "gradient_allreduce")
        messages.append(str(caught.value))
        assert equal(before, values(model)) and "LocalSGD" in bagua.stats(model).algorithm
        train(model, optimizer, range(2, 9))
        assert bagua.stats(model).steps == 9
        weights = of_all([param.detach().clone() for param in model.parameters()])
        assert not equal(weights[0], weights[1])
        bagua.average_parameters(model)
    return messages[0], messages[1]


def test_optimizer_state_that_cannot_travel(pool: RankPool) -> None:
    for first, second in pool.run(2, opaque):
        assert first.startswith("optimizers: number 0 (SGD8), state 'momentum': a Codes cannot be broadcast")
        assert second.startswith("tensor subclasses in the optimizers' state differs: rank 1 has")
