"""Steps that walk through ranges of large tensors, against steps on whole ones: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua.optim import OneBitLamb, QAdam, TwoStage, ZeroOneAdam, blocked
from bagua.optim.two_stage import raised

RANGE = 1 << 10
SIZES = [1, 7, RANGE - 1, RANGE, RANGE + 1, 2 * RANGE, 3 * RANGE + 5]
STEPS = 8
OPTIMIZERS: dict[str, Callable[..., TwoStage]] = {
    "QAdam": lambda params, **options: QAdam(params, warmup_steps=3, **options),
    "OneBitLamb": lambda params, **options: OneBitLamb(params, warmup_steps=3, **options),
    "ZeroOneAdam": lambda params, **options: ZeroOneAdam(params, var_freeze_step=4, var_update_scaler=2, **options),
    "ZeroOneAdam, local steps": lambda params, **options: ZeroOneAdam(
        params, var_freeze_step=2, local_step_scaler=3, local_step_clipper=2, **options
    ),
}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Small and large ones, and large ones in layouts of all kinds."""
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    made = [some(size) for size in SIZES]
    made.append(some(3, 40, 5, 7).to(memory_format=torch.channels_last))
    made.append(some(70, 50).t())
    made.append(some(60, 90)[:, ::2])  # with gaps
    made.append(some(4 * RANGE)[11 : 11 + 3 * RANGE].view(3, -1))  # part of something larger
    return [nn.Parameter(each) for each in made]


def train(name: str, longest: int, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """All weights after each step, and the state in the end."""
    monkeypatch.setattr(blocked, "_longest", lambda: longest)
    params = parameters(dtype)
    optimizer = OPTIMIZERS[name](params, lr=0.01, **options)
    generator = torch.Generator().manual_seed(2)
    seen: list[Tensor] = []
    for step in range(STEPS):
        for number, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(dtype)
            grad[..., :2] = 0  # elements that never move
            param.grad = torch.empty_like(param, memory_format=torch.preserve_format).copy_(grad)
            if number == 8 and step % 2:
                param.grad = grad.contiguous()  # not in the parameter's layout
            if (step + number) % 5 == 0:
                param.grad = None
        optimizer.step()
        if isinstance(optimizer, ZeroOneAdam) and optimizer.kind(step + 1).name == "MEET":
            means = [torch.empty_like(param) for param in params]
            optimizer.mean_momenta(params, means)
            optimizer.meet(params, means)
        seen += [param.detach().clone() for param in params]
    for slot in optimizer.state.values():
        seen += [value if isinstance(value, Tensor) else torch.tensor(value) for value in slot.values()]
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, False), (0.1, False), (0.1, True)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits(
    name: str, weight_decay: float, decoupled: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled}
    whole = train(name, 1 << 40, monkeypatch, dtype, **options)
    walked = train(name, RANGE, monkeypatch, dtype, **options)
    assert len(whole) == len(walked) > STEPS
    for a, b in zip(whole, walked, strict=True):
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_floors_raise_what_is_low_and_fix_what_never_moved(dtype: torch.dtype) -> None:
    low = torch.finfo(dtype).smallest_normal
    moment = torch.tensor([0.0, -0.0, low, 0.5, 1.0, 4.0, torch.inf, torch.nan] * 9, dtype=dtype)
    got = raised(moment, torch.tensor(1.0, dtype=dtype))
    want = torch.tensor([torch.inf, torch.inf, 1.0, 1.0, 1.0, 4.0, torch.inf, torch.nan] * 9, dtype=dtype)
    assert got.dtype == dtype
    assert torch.equal(got.nan_to_num(-1.0, 1e4), want.nan_to_num(-1.0, 1e4))


def test_each_element_is_walked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "_longest", lambda: RANGE)
    for tensor in parameters(torch.float32):
        param = tensor.detach().zero_()
        with torch.no_grad():
            walked = list(blocked.ranges([param], [param.clone(memory_format=torch.preserve_format)]))
            for first, second in walked:
                first[0] += second[0] + 1
        is_cut = param.numel() > RANGE and blocked.is_dense(param)
        assert len(walked) == (-(-param.numel() // RANGE) if is_cut else 1)
        assert bool((param == 1).all())


def test_batches_hold_a_large_one_or_some_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "_longest", lambda: 10)
    sizes = [4, 11, 6, 1, 30, 10, 0, 3]
    live: list[blocked.Live] = [(torch.empty(size), torch.empty(size), {}) for size in sizes]
    live.insert(3, (torch.empty(50, device="meta"), torch.empty(50, device="meta"), {}))
    found = [[param.numel() for param in params] for params, _, _ in blocked.batches(live)]
    assert found == [[11], [4, 6], [30], [1], [10, 0], [3], [50]]
    assert list(blocked.batches([])) == []


def test_other_memory_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "_longest", lambda: 10)
    square = torch.zeros(5, 5)
    for other in (torch.zeros(5, 5).t(), torch.zeros(5, 5).double(), torch.zeros(5, 10)[:, ::2]):
        assert len(list(blocked.ranges([square], [other]))) == 1
    assert len(list(blocked.ranges([square], [square]))) == 3
    assert len(list(blocked.ranges([square.bfloat16()], [square.bfloat16()]))) == 1
    assert len(list(blocked.ranges([torch.zeros(5, 1, 5)], [torch.zeros(5, 5, 1).transpose(1, 2)]))) == 3


def test_ranges_grow_with_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(1 << 21)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = len(list(blocked.ranges([tensor])))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert len(list(blocked.ranges([tensor]))) * 4 == alone
