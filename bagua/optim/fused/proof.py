"""Try on small copies whether an optimizer acts element by element: fused against unfused, bit for bit."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bagua.optim.fused.layout import Limits, limits_for
from bagua.optim.fused.slots import fits, is_elementwise, same_value

__all__ = ["NotElementwiseError", "find_difference"]

_NUM_STEPS = 8
_SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((), ()),
    1: ((7,), (33,), (2,), (16,), (64,), (80,), (192,)),
    2: ((5, 3), (3, 12), (8, 8), (4, 32)),
    3: ((3, 2, 5), (2, 4, 3), (4, 4, 4), (2, 8, 4)),
    4: ((4, 3, 3, 3), (2, 2, 5, 1), (4, 2, 2, 4), (2, 2, 8, 2)),
}
_CHUNK = 48  # elements; so that pieces begin and end within parameters
_WHOLE_CHUNK = 64  # elements, where a piece has to begin and end where a vector does


class NotElementwiseError(ValueError):
    """The optimizer's step on an element depends on other elements."""


def find_difference(
    optimizer: torch.optim.Optimizer, attach: Callable[..., Any], own_step: Callable[..., Any]
) -> str | None:
    """Step two small copies, one fused and one not, with equal gradients; return what differs, None if nothing does.

    The copies have the optimizer's attributes, the options of its groups and parts of its state, but no hooks.
    Gradients differ in scale from step to step and parameter to parameter; in one step some are missing. Neither the
    optimizer nor the generators of random numbers are changed.
    """
    devices = {p.device.index or 0 for group in optimizer.param_groups for p in group["params"] if p.is_cuda}
    with torch.random.fork_rng(sorted(devices)):
        small = [_small_params(group) for group in _distinct(optimizer.param_groups)]
        try:
            plain, fused = (_copy(optimizer, [[_clone(p) for p in params] for params in small]) for _ in range(2))
        except Exception as error:  # attributes of a user's class: anything may come
            return f"it cannot be copied for the check ({type(error).__name__}: {error}); check=False skips the check"
        fault = _give_state(optimizer, plain, fused)
        if fault:
            return fault
        attach(fused, _limits)
        generator = torch.Generator().manual_seed(0)
        for step in range(_NUM_STEPS):
            _set_gradients(plain, fused, step, generator)
            try:
                own_step(plain)
            except Exception as error:
                return (
                    f"it cannot be tried on small copies ({type(error).__name__}: {error}); check=False skips the check"
                )
            try:
                fused.step()
            except Exception as error:
                return f"its step fails on flat parameters ({type(error).__name__}: {error})"
            difference = _compare(plain, fused)
            if difference:
                return f"at step {step + 1} of a trial, {difference}"
    return None


def _limits(dtype: torch.dtype, device: torch.device, group: Mapping[str, Any]) -> Limits:
    """The limits of the device, with short pieces."""
    real = limits_for(dtype, device, group)
    if group.get("fused") or real.place_counts:
        return replace(real, chunk=None if real.chunk is None else _WHOLE_CHUNK)
    return Limits(small=1 << 30, chunk=_CHUNK)


def _distinct(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that differ in their options; those that differ in parameters and learning rate only are one."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        one = found.setdefault(repr(_options(group)), {**group, "params": []})
        one["params"] += group["params"]
    return list(found.values())


def _small_params(group: dict[str, Any]) -> list[nn.Parameter]:
    """Small parameters of the dtypes, devices and numbers of dimensions that occur in the group."""
    kinds = {(p.dtype, p.device, min(p.ndim, 4), p.numel() < 2) for p in group["params"] if _is_plain(p)}
    generator = torch.Generator().manual_seed(1)
    made = []
    for dtype, device, ndim, single in sorted(kinds, key=str):
        for number, shape in enumerate(_SHAPES[ndim] if not single else [(1,) * ndim] * 2):
            values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * 10.0 ** (
                number % 6 - 1
            )
            made.append(nn.Parameter(values.to(device=device, dtype=dtype)))
    return made


def _is_plain(param: Tensor) -> bool:
    return param.layout is torch.strided and type(param.data) is Tensor and not param.is_meta


def _clone(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(param.detach().clone())


def _copy(optimizer: torch.optim.Optimizer, params: Sequence[list[nn.Parameter]]) -> torch.optim.Optimizer:
    """An optimizer like `optimizer` for other parameters. Its own ones are nowhere in it."""
    groups = _distinct(optimizer.param_groups)
    kinds = [repr(_options(group)) for group in groups]
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:  # an attribute that refers to a parameter refers to a small one
        own = params[kinds.index(repr(_options(group)))]
        memo |= {id(param): own[0] if own else None for param in group["params"]}
    made = type(optimizer).__new__(type(optimizer))
    skipped = {"state", "param_groups", "step"}
    attributes = {k: v for k, v in vars(optimizer).items() if k not in skipped and "_hooks" not in k}
    vars(made).update(copy.deepcopy(attributes, memo))
    for name in vars(optimizer):
        if "_hooks" in name:
            vars(made)[name] = OrderedDict()
    vars(made)["state"] = defaultdict(dict)
    made_groups = vars(made)["param_groups"] = []
    for group, own in zip(groups, params, strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        made_groups.append({**copy.deepcopy(options, memo), "params": list(own)})
    return made


def _give_state(optimizer: torch.optim.Optimizer, *copies: torch.optim.Optimizer) -> str | None:
    """Give the copies' parameters a state like that of real ones, where these have one already."""
    for group, *own in zip(_distinct(optimizer.param_groups), *(each.param_groups for each in copies), strict=True):
        examples: dict[Any, list[Tensor]] = {}
        for param in group["params"]:
            if optimizer.state.get(param) and param.numel() > 1:
                examples.setdefault((param.dtype, param.device), []).append(param)
        for number, params in enumerate(zip(*(each["params"] for each in own), strict=True)):
            alike = examples.get((params[0].dtype, params[0].device))
            if not alike:
                continue
            example = alike[number % len(alike)]
            slot = optimizer.state[example]
            for key, value in slot.items():
                if not fits({key: value}, example):
                    return f"state {key!r} is neither of the parameter's shape nor a scalar"
            for made, param in zip(copies, params, strict=True):
                made.state[param] = {key: _part(value, example, param) for key, value in slot.items()}
        for made in copies:
            made.state.update({k: copy.deepcopy(v) for k, v in optimizer.state.items() if not isinstance(k, Tensor)})
    return None


def _part(value: Any, example: Tensor, param: Tensor) -> Any:
    """`value`, a state of `example`, for the smaller `param`."""
    if not is_elementwise(value, example):
        return copy.deepcopy(value)
    some = value.detach().reshape(-1)[: param.numel()]
    return some.repeat(-(-param.numel() // some.numel()))[: param.numel()].reshape(param.shape).clone()


def _options(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a group's options are; the learning rate does not count."""
    return [(k, v) for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr")]


def _params(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _set_gradients(
    plain: torch.optim.Optimizer, fused: torch.optim.Optimizer, step: int, generator: torch.Generator
) -> None:
    for number, (one, other) in enumerate(zip(_params(plain), _params(fused), strict=True)):
        values = torch.randn(one.shape, generator=generator, dtype=torch.float64, device="cpu")
        values *= 10.0 ** ((step * 2 + number) % 5 - 3)
        grad = values.to(device=one.device, dtype=one.dtype)
        if step == 4 and number % 2:
            one.grad = other.grad = None
        else:
            one.grad, other.grad = grad, grad.clone()


def _compare(plain: torch.optim.Optimizer, fused: torch.optim.Optimizer) -> str | None:
    for one, other in zip(_params(plain), _params(fused), strict=True):
        what = f"parameter of shape {list(one.shape)}"
        a, b = plain.state.get(one, {}), fused.state.get(other, {})
        for key in {**a, **b}:
            if key not in a or key not in b or not _equal(a[key], b[key]):
                return f"state {key!r} of a {what} differs from the unfused one"
        if not same_value(one.detach(), other.detach()):
            most = (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()
            return f"a {what} differs from the unfused one by up to {most:.2g}"
    for one, other in zip(plain.param_groups, fused.param_groups, strict=True):
        for key in {**one, **other}:
            if key != "params" and not _equal(one.get(key), other.get(key)):
                return f"option {key!r} differs from the unfused one"
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or not isinstance(one, list | tuple | dict):
        return same_value(one, other)
    return repr(one) == repr(other)
