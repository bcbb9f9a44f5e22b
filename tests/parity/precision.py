"""Rows: number formats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import bagua
from bagua.engine.distributed_module import attached_buckets
from tests.parity.case import FEW, Case
from tests.parity.feature import Refused, feature
from tests.parity.model import STEPS, Small, batch, equal, loss_of, same_everywhere, target, train, weights

SECTION = "Precision"
LOCAL = ("decentralized", "diloco", "local_sgd", "low_precision_decentralized", "sparse_loco", "zero_one_adam")


@feature(SECTION, "autocast to bf16 and fp16")
def autocast(case: Case) -> None:
    """fp32 weights and gradients, 16-bit products."""
    for dtype in (torch.bfloat16, torch.float16):
        model, optimizer = case.build()

        def backward(step: int, model: nn.Module = model, dtype: torch.dtype = dtype) -> None:
            with torch.autocast("cpu", dtype=dtype):
                out = model(batch(step))
            assert out.dtype is torch.float32 or out.dtype is dtype
            (out.float() - target(step)).square().mean().backward()

        train(model, optimizer, backward=backward)
        case.check_same_run(model, slack=max(0.3, 2 * case.slack))
        bagua.detach(model)


@feature(SECTION, "bf16 and fp16 parameters")
def half_parameters(case: Case) -> str | None:
    """Exchanged in their own type."""
    for dtype in (torch.bfloat16, torch.float16):
        model, optimizer = case.build(lambda dtype=dtype: Cast(Small(), dtype))
        if case.own_optimizer:
            optimizer.param_groups[0]["eps"] = 1e-3
        train(model, optimizer)
        assert all(param.dtype is dtype for param in model.parameters())
        case.check_agreement(model)
        assert not equal(weights(model), case.start(lambda dtype=dtype: Cast(Small(), dtype)))
        bagua.detach(model)
    return "with an `eps` that fp16 can hold, as for any Adam" if case.own_optimizer else None


class Cast(nn.Module):
    """`inner` in another type; fp32 outside."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner.to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.dtype)).float()


class Mixed(nn.Module):
    """fp32, bf16 and fp64 parameters in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Cast(nn.Linear(6, 6), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32)
        )
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


@feature(SECTION, "parameters of several types in one module: one bucket, one type")
def mixed_types(case: Case) -> None:
    """Nothing is cast on the way."""
    model, optimizer = case.build(Mixed, bucket_bytes=1 << 20)
    before = weights(model)
    train(model, optimizer)
    for bucket in attached_buckets(model):
        assert {param.dtype for param in bucket.params} == {bucket.flat.dtype}
    assert len(attached_buckets(model)) == 3
    case.check_agreement(model)
    assert {name: value.dtype for name, value in weights(model).items()} == {n: v.dtype for n, v in before.items()}
    assert not any(torch.equal(value, before[name]) for name, value in weights(model).items())


def scaled_run(case: Case, scaler: torch.amp.GradScaler, overflow_at: int, steps: int) -> list[dict[str, Tensor]]:
    """Train with a scaler; one rank's loss is infinite at one step. Returns the weights after each step."""
    model, optimizer = case.build()
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == overflow_at and torch.distributed.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(weights(model))
    assert bagua.stats(model).steps == steps - 1 or not case.synchronous
    case.check_agreement(model)
    return found


def scaled(case: Case, make: Callable[..., torch.amp.GradScaler]) -> None:
    """A step is skipped by all or by none."""
    # Within an interval of local steps, in the algorithm that has them, and while gradients are exchanged.
    for overflow_at, steps in ((2, 5), (4, 7)):
        scaler = make("cpu", init_scale=1024.0, growth_interval=100)
        found = scaled_run(case, scaler, overflow_at, steps)
        if case.synchronous:
            assert scaler.get_scale() == 512.0, "not all ranks saw it"
        if not case.options.get("communication_interval"):  # an average is no part of the step
            skipped = equal(found[overflow_at], found[overflow_at - 1])
            assert skipped or not case.algorithm.exactness.replicas_equal
        assert not equal(found[overflow_at], found[overflow_at + 1])
        if case.shares_gradients and case.name != "zero_one_adam":
            assert all(same_everywhere(each) for each in found)


@feature(
    SECTION,
    "`torch.amp.GradScaler`: an overflow on one rank skips the step on all",
    refused=dict.fromkeys(LOCAL, r"steps with local gradients.*use bagua\.GradScaler"),
)
def torch_scaler(case: Case) -> str | None:
    """Where the exchanged gradient is infinite on all ranks. Elsewhere no rank may hang."""
    if case.name in LOCAL:
        model, optimizer = case.build()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(loss_of(model, 0)).backward()
        try:
            scaler.step(optimizer)
        except RuntimeError as error:
            raise Refused(str(error)) from None
        raise AssertionError("not refused")
    scaled(case, torch.amp.GradScaler)
    return None if case.synchronous else "each rank skips its own steps; none waits"


@feature(SECTION, "`bagua.GradScaler`: the same, also where gradients stay local")
def agreeing_scaler(case: Case) -> str | None:
    """One number a step is reduced, where it must."""
    scaled(case, bagua.GradScaler)
    return None if case.synchronous else "each rank skips its own steps; none waits"


@feature(SECTION, "a disabled `torch.amp.GradScaler`, as bf16 scripts have it", daily=FEW)
def disabled_scaler(case: Case) -> None:
    """Does nothing, and is not refused."""
    model, optimizer = case.build()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    case.check_same_run(model, exactly=True)
