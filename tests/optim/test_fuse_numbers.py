"""A fused optimizer gives the numbers of the unfused one, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from bagua.optim import fuse
from bagua.optim.fused import is_fused
from tests.daily import one_in
from tests.optim.optimizers import BertAdam, Lion, Replacing
from tests.optim.training import Model, assert_same, train

Make = Callable[[Any], optim.Optimizer]
CASES: dict[str, Make] = {
    "sgd": partial(optim.SGD, lr=1e-3),
    "momentum": partial(optim.SGD, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "nesterov": partial(optim.SGD, lr=1e-3, momentum=0.9, nesterov=True, maximize=True),
    "adam": partial(optim.Adam, weight_decay=0.1),
    "amsgrad": partial(optim.Adam, amsgrad=True),
    "adamw": optim.AdamW,
    "adam_tensor_lr": lambda params: optim.Adam(params, lr=torch.tensor(1e-3)),
    "adam_foreach": partial(optim.Adam, foreach=True),
    "adam_one_kernel": partial(optim.Adam, fused=True),
    "adamax": optim.Adamax,
    "rmsprop": partial(optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rprop": optim.Rprop,
    "asgd": optim.ASGD,
    "lion": Lion,
    "bert_adam": BertAdam,
    "replacing": Replacing,
}


@pytest.mark.parametrize(("name", "set_to_none"), one_in(2, CASES, [True, False]))
def test_numbers(name: str, set_to_none: bool) -> None:
    plain = train(CASES[name], False, set_to_none=set_to_none)
    fused = train(CASES[name], True, set_to_none=set_to_none)
    assert_same(plain, fused)


@pytest.mark.parametrize("name", ["momentum", "adam", "asgd", "bert_adam"])
def test_state_dicts_are_interchangeable(name: str) -> None:
    """Fused to unfused and back within a training; through a file, as users do."""

    def run(first: bool, second: bool) -> tuple[Model, optim.Optimizer]:
        model, optimizer = train(CASES[name], first, steps=5)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        state = torch.load(file)

        def load(step: int, other: Model, resumed: optim.Optimizer) -> None:
            if step == 3:  # a used one: it has a state and a layout already
                other.load_state_dict(model.state_dict())
                resumed.load_state_dict(state)

        return train(CASES[name], second, steps=7, each=load)

    expected = run(False, False)
    assert_same(expected, run(True, False))
    assert_same(expected, run(False, True))
    assert_same(expected, run(True, True))


@pytest.mark.parametrize("name", ["adam", "bert_adam"])
def test_fused_in_the_middle(name: str) -> None:
    def late(step: int, _: Model, optimizer: optim.Optimizer) -> None:
        if step == 4:
            fuse(optimizer)

    assert_same(train(CASES[name], False), train(CASES[name], False, each=late))


@pytest.mark.parametrize("name", ["amsgrad", "adadelta"])
def test_fused_when_resumed_with_parameters_of_several_dtypes(name: str) -> None:
    def run(fused: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        dtypes = (torch.float32, torch.bfloat16, torch.float64) * 2
        params = [nn.Parameter(torch.randn(5, 5, generator=generator).to(dtype)) for dtype in dtypes]
        optimizer = CASES[name](params)
        for step in range(6):
            for param in params:
                param.grad = torch.randn(5, 5, generator=generator).to(param.dtype)
            optimizer.step()
            if step == 2:
                resumed = CASES[name](params)
                resumed.load_state_dict(optimizer.state_dict())
                optimizer = fuse(resumed) if fused else resumed
        return [param.detach() for param in params]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_schedulers_and_groups() -> None:
    def run(fused: bool) -> tuple[Model, optim.Optimizer]:
        schedulers: list[optim.lr_scheduler.LRScheduler] = []

        def make(params: Any) -> optim.Optimizer:
            params = [param for param in params if param.requires_grad]
            optimizer = optim.AdamW([{"params": params[:5]}, {"params": params[5:], "weight_decay": 0.3}], lr=1e-3)
            schedulers.append(optim.lr_scheduler.StepLR(optimizer, 1, 0.5))  # before it is fused
            return optimizer

        def each(step: int, model: Model, optimizer: optim.Optimizer) -> None:
            if step == 0:
                schedulers.append(optim.lr_scheduler.CosineAnnealingLR(optimizer, 8))  # after it is fused
            else:
                for scheduler in schedulers:
                    scheduler.step()
            if step == 3:
                model.frozen.requires_grad_(True)
                model.frozen.register_hook(lambda grad: grad)
                optimizer.add_param_group({"params": [model.frozen], "lr": 0.1})
                model.frozen.grad = torch.ones(5)

        return train(make, fused, each=each)

    assert_same(run(False), run(True))


def test_options_changed_between_steps() -> None:
    def each(step: int, model: Model, optimizer: optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
        if step == 2:
            optimizer.param_groups[0]["betas"] = (0.8, 0.9)
        if step == 4:
            optimizer.state[model.first.bias]["exp_avg"].zero_()
            optimizer.state[model.first.weight]["exp_avg_sq"] = torch.ones(40, 6)
        if step == 5:
            optimizer.state[model.norm.weight]["step"].fill_(0.0)
        if step == 6:
            del optimizer.state[model.norm.bias]
        if step == 7:
            with torch.no_grad():
                model.conv.weight.data = torch.ones(3, 1, 5)
                model.norm.weight.fill_(2.0)

    assert_same(train(CASES["adam"], False, each=each), train(CASES["adam"], True, each=each))


def test_the_state_is_shown_as_it_is() -> None:
    seen: dict[bool, list[Any]] = {False: [], True: []}

    def run(fused: bool) -> None:
        def each(step: int, model: Model, optimizer: optim.Optimizer) -> None:
            assert len(optimizer.state) == (0 if step == 0 else len(list(optimizer.state)))
            slot = optimizer.state.get(model.first.bias)
            if slot:
                seen[fused].append((float(slot["step"]), slot["exp_avg"].clone().tolist(), slot["exp_avg"].shape))
            assert (model.rare.bias in optimizer.state) == (step > 2)

        train(CASES["adam"], fused, each=each)

    run(False)
    run(True)
    assert seen[False] == seen[True] and len(seen[True]) == 7


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_plain_and_go_on_alike(how: str) -> None:
    model, optimizer = train(CASES["adam"], True)
    pair = (model, optimizer)
    other, plain = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert is_fused(optimizer) and not is_fused(plain) and type(plain) is type(optimizer) is optim.Adam
    assert type(plain.state) is not type(optimizer.state)
    for each, stepped in ((model, optimizer), (other, plain)):
        torch.manual_seed(7)
        for _ in range(3):
            each(torch.randn(4, 6), True).backward()
            stepped.step()
            stepped.zero_grad()
    assert_same((model, optimizer), (other, plain))


def test_closures_hooks_and_results() -> None:
    calls: list[str] = []
    param = nn.Parameter(torch.ones(3))
    other = nn.Parameter(torch.ones(4))
    optimizer = optim.SGD([param, other], lr=0.1)
    fuse(optimizer)
    optimizer.register_step_pre_hook(lambda o, *_: calls.append(f"before {len(o.param_groups[0]['params'])}"))
    optimizer.register_step_post_hook(lambda o, *_: calls.append(f"after {len(o.param_groups[0]['params'])}"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param.sum() + other.sum()) ** 2
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 49
    assert optimizer.step(closure=closure).item() == pytest.approx((7 - 7 * 1.4) ** 2)
    assert calls == ["before 2", "after 2"] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    def mixed(step: int, model: Model, _: optim.Optimizer) -> None:
        if step == 0:
            model.first.to(dtype)
            model.first.register_forward_pre_hook(lambda _, args: (args[0].to(dtype),))
            model.first.register_forward_hook(lambda *args: args[2].float())

    assert_same(train(CASES["adamw"], False, each=mixed), train(CASES["adamw"], True, each=mixed))


def test_grad_scaler() -> None:
    """It unscales in place, and skips a step whose gradients are not finite."""

    def run(fused: bool) -> tuple[list[nn.Parameter], float]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(n)) for n in (5, 9, 70)]
        optimizer = optim.Adam(params, lr=0.1)
        if fused:
            fuse(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(6):
            loss = sum((param * param).sum() for param in params) * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return params, scaler.get_scale()

    (a, scale), (b, fused_scale) = run(False), run(True)
    assert scale == fused_scale
    assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def test_gradients_that_stay_are_copied_once() -> None:
    params = [nn.Parameter(torch.randn(5, 3)) for _ in range(4)]
    optimizer = fuse(optim.SGD(params, lr=0.1))
    for step in range(4):
        sum(param.square().sum() for param in params).backward()  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
        grads = [param.grad for param in params if param.grad is not None]
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) == (4 if step == 0 else 1)
        optimizer.zero_grad(set_to_none=False)


def test_fewer_tensors_are_stepped() -> None:
    seen: list[int] = []

    class Counting(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(len(self.param_groups[0]["params"]))
            return super().step(closure)

    params = [nn.Parameter(torch.randn(5, 3)) for _ in range(200)]
    optimizer = fuse(Counting(params, lr=0.1), check=False)
    for param in params:
        param.grad = torch.ones(5, 3)
    optimizer.step()
    assert seen == [1]
    assert len(optimizer.param_groups[0]["params"]) == 200


def test_large_parameters_are_stepped_in_pieces_and_odd_ones_as_they_are() -> None:
    model, optimizer = train(optim.Adam, True)
    stepper = vars(optimizer)["_bagua_stepper"]
    pieces = {
        arena.params[0]: [len(unit.pieces) for unit in arena.units]
        for arena in stepper.arenas
        if arena.kind == "direct"
    }
    assert pieces == {model.large.weight: [3]}
    gathered = [param for arena in stepper.arenas if arena.kind == "gathered" for param in arena.params]
    left = {model.scale, model.slope, model.large.weight, model.frozen}
    assert set(gathered) == set(model.parameters()) - left | {model.frozen}


def test_parameters_that_change_their_group() -> None:
    def run(fused: bool) -> list[torch.Tensor]:
        params = [nn.Parameter(torch.full((n,), 2.0)) for n in (3, 4, 5)]
        optimizer = optim.SGD([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.5}], momentum=0.9)
        if fused:
            fuse(optimizer)
        for step in range(4):
            if step == 2:
                first, second = (group["params"] for group in optimizer.param_groups)
                second.insert(0, first.pop())
            for param in params:
                param.grad = param.detach() * 0.1
            optimizer.step()
        return [param.detach() for param in params]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_gradients_that_are_kept_can_be_detached_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = fuse(optim.Adam(model.parameters()))
    for _ in range(4):
        for param in model.parameters():
            if param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
