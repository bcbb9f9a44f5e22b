"""A switch that cannot be made leaves the module distributed as before; one that fails on a plain module, plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import bagua
from bagua.algorithms import DiLoCo
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


class Codes(Tensor):
    """As torchao's 8-bit states: a tensor made of 8-bit codes and a scale, which computes by decoding."""

    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def decoded(self) -> Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args
            source = source.decoded() if isinstance(source, Codes) else source
            target.scale.fill_(max(float(source.abs().max()) / 127, 1e-12))
            target.codes.copy_((source / target.scale).round())
            return target
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        args = [each.decoded() if isinstance(each, Codes) else each for each in args]
        return func(*args, **(kwargs or {}))


class Flat(Codes):
    """Can be taken apart."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None


class SGD8(torch.optim.Optimizer):
    """Momentum in codes of `kind`."""

    def __init__(self, params: Any, kind: Callable[[Tensor, Tensor], Tensor], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if not self.state[param]:
                        codes = torch.zeros(param.shape, dtype=torch.int8)
                        self.state[param]["momentum"] = self.kind(codes, torch.ones(1))
                    moment = self.state[param]["momentum"]
                    moment.copy_(0.9 * moment + param.grad)
                    param.sub_(group["lr"] * (moment + 0))


def momenta(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    return [
        [slot["momentum"].codes.clone(), slot["momentum"].scale.clone()] for slot in optimizer.state.values() if slot
    ]


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
