"""On a CPU torch rounds half-precision and complex numbers by their place in a tensor; a fused step keeps that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from bagua.optim import NotElementwiseError, fuse
from tests.optim.optimizers import Lamb
from tests.optim.test_fuse_numbers import CASES, Make

_SHAPES = [
    (64,), (5, 5), (8, 8), (3,), (128, 256), (64, 3), (192,), (16, 12), (64, 513), (1, 64), (128, 200), (96, 256),
]  # fmt: skip


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)  # 3 divides no number of vectors
    yield
    torch.set_num_threads(before)


def train(
    make: Make,
    dtype: torch.dtype,
    fused: bool,
    each: Callable[[int, optim.Optimizer], None] = lambda *_: None,
    turned: Sequence[int] = (),
) -> list[Tensor]:
    """Parameters and states after some steps.

    Args:
        each: called before each step.
        turned: numbers of the parameters whose gradients have other strides.
    """
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in _SHAPES]
    params.append(nn.Parameter(torch.randn(32, 16, generator=generator).to(dtype).t()))
    optimizer = make(params)
    if fused:
        fuse(optimizer)
    for step in range(5):
        each(step, optimizer)
        for number, param in enumerate(params):
            values = torch.randn(param.shape, generator=generator) * 10.0 ** ((step * 2 + number) % 5 - 3)
            grad = torch.empty_like(param).copy_(values)
            param.grad = grad.t().contiguous().t() if number in turned else grad
            if step == 3 and number % 2:
                param.grad = None
        optimizer.step()
    if fused:
        arenas = vars(optimizer)["_bagua_stepper"].arenas
        assert sum(len(arena.params) for arena in arenas if len(arena.params) > 1) >= 7
    states = [value for param in params for value in optimizer.state[param].values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in (*params, *states)]


def assert_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        a, b = (torch.view_as_real(each) if each.is_complex() else each for each in (a, b))
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["sgd", "momentum", "adam", "rmsprop", "adagrad", "nadam", "asgd", "lion", "bert_adam"]
)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    assert_equal(train(CASES[name], dtype, False), train(CASES[name], dtype, True))


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("name", ["momentum", "adam", "adam_foreach"])
def test_complex(name: str) -> None:
    assert_equal(train(CASES[name], torch.complex128, False), train(CASES[name], torch.complex128, True))


@pytest.mark.parametrize("kind", [optim.SGD, optim.RMSprop])
def test_options_that_the_trial_has_not_seen(kind: Any) -> None:
    def each(_: int, optimizer: optim.Optimizer) -> None:
        optimizer.param_groups[0]["momentum"] = 0.9

    def make(params: Any) -> optim.Optimizer:
        return kind(params, lr=0.01)

    assert_equal(train(make, torch.bfloat16, False, each), train(make, torch.bfloat16, True, each))


def test_gradients_and_states_of_other_strides() -> None:
    def each(step: int, optimizer: optim.Optimizer) -> None:
        if step == 2:
            for param in optimizer.param_groups[0]["params"][-4:]:
                slot = optimizer.state[param]
                slot["momentum_buffer"] = slot["momentum_buffer"].t().contiguous().t()

    for turned, change in (((2, 11), lambda *_: None), ((), each)):
        plain, fused = (train(CASES["momentum"], torch.bfloat16, fused, change, turned) for fused in (False, True))
        assert_equal(plain, fused)


def test_gradients_of_another_dtype_are_not_rounded() -> None:
    def run(fused: bool) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(3)]
        optimizer = optim.SGD(params, lr=1.0)
        if fused:
            fuse(optimizer)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for param in params:
                setattr(param, "grad_dtype", torch.float32)  # noqa: B010 - torch's stubs lack it
                param.grad = torch.randn(64, generator=generator)
            optimizer.step()
        return [param.detach() for param in params]

    assert_equal(run(False), run(True))


def test_vectors_alone_suffice_for_the_trial() -> None:
    with pytest.raises(NotElementwiseError):
        fuse(Lamb([nn.Parameter(torch.randn(64, dtype=torch.bfloat16)) for _ in range(3)]))
