"""The optimizer QAdam by itself: its state dicts and options."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import bagua

WARMUP, LR = 12, 0.05


def optimizer(params: Any, **options: Any) -> bagua.optim.QAdam:
    return bagua.optim.QAdam(params, **{"lr": LR, "warmup_steps": WARMUP, "betas": (0.9, 0.99), **options})


def test_state_dicts() -> None:
    """Copies go on alike; Adam's state is understood, and Adam understands ours."""
    param = nn.Parameter(torch.ones(5))
    own = optimizer([param])

    def go(on: torch.optim.Optimizer, steps: int) -> torch.Tensor:
        (only,) = on.param_groups[0]["params"]
        for step in range(steps):
            only.grad = torch.sin(torch.arange(5.0) + step)
            on.step()
        return only.detach().clone()

    go(own, WARMUP + 3)
    twins = [copy.deepcopy(own), pickle.loads(pickle.dumps(own))]
    want = go(own, 4)
    for twin in twins:
        assert twin.num_steps == WARMUP + 3 and torch.equal(go(twin, 4), want)

    theirs = nn.Parameter(torch.ones(5))
    adam = torch.optim.Adam([theirs], lr=LR)
    go(adam, 40)
    param = nn.Parameter(theirs.detach().clone())
    own = optimizer([param])
    own.load_state_dict(adam.state_dict())
    assert own.num_steps == 40 and own.compressing and own.warmup_steps == WARMUP
    before = param.detach().clone()
    go(own, 1)
    assert 0 < (param - before).abs().max() < 2 * LR, "v is of 40 steps, and corrected for 40"
    adam.load_state_dict(own.state_dict())
    go(adam, 1)


@pytest.mark.parametrize("kind", [bagua.optim.QAdam, bagua.optim.OneBitLamb, bagua.optim.ZeroOneAdam])
@pytest.mark.parametrize("decoupled", [False, True])
def test_state_dicts_know_how_weights_decay(kind: Any, decoupled: bool) -> None:
    """One that does not say so was made before the option and leaves the optimizer's own; torch's do say so."""
    weight = nn.Parameter(torch.ones(3))
    options = {"lr": 0.1, "weight_decay": 0.5, "decoupled_weight_decay": decoupled}
    saved = kind([weight], **options).state_dict()
    fresh = kind([weight], **{**options, "decoupled_weight_decay": not decoupled})
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["decoupled_weight_decay"] is decoupled
    del saved["param_groups"][0]["decoupled_weight_decay"]
    old = kind([weight], **options)
    old.load_state_dict(saved)
    assert old.param_groups[0]["decoupled_weight_decay"] is decoupled
    torchs = (torch.optim.AdamW if decoupled else torch.optim.Adam)([weight], weight_decay=0.5)
    if "decoupled_weight_decay" in torchs.param_groups[0]:
        fresh = kind([weight], **{**options, "decoupled_weight_decay": not decoupled})
        fresh.load_state_dict(torchs.state_dict())
        assert fresh.param_groups[0]["decoupled_weight_decay"] is decoupled
    weight.grad = torch.zeros(3)
    old.step()
    assert bool((weight != 1).all()), "weights decay"
    assert not old.state[weight]["exp_avg"].any() or not decoupled, "out of the moments"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, ("lr", "-1")),
        ({"lr": float("nan")}, ("lr", "nan")),
        ({"warmup_steps": 0}, ("warmup_steps", "0")),
        ({"warmup_steps": 2.5}, ("warmup_steps", "2.5")),
        ({"warmup_steps": True}, ("warmup_steps", "True")),
        ({"betas": (0.9, 1.0)}, ("betas", "1.0")),
        ({"betas": 0.9}, ("betas", "0.9")),
        ({"eps": -1e-8}, ("eps", "-1e-08")),
        ({"weight_decay": "much"}, ("weight_decay", "much")),
        ({"decoupled_weight_decay": 0.1}, ("decoupled_weight_decay", "True or False", "0.1")),
    ],
)
def test_bad_options_of_the_optimizer(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        bagua.optim.QAdam([nn.Parameter(torch.ones(2))], **options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_groups_share_the_warm_up() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "warmup_steps": 7}]
    with pytest.raises(ValueError, match="warmup_steps.*same.*7.*100"):
        bagua.optim.QAdam(groups)


def test_sparse_gradients_are_refused() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    param.grad = torch.eye(2).to_sparse()
    with pytest.raises(RuntimeError, match="QAdam.*sparse"):
        bagua.optim.QAdam([param]).step()


KINDS = [bagua.optim.QAdam, bagua.optim.OneBitLamb, bagua.optim.ZeroOneAdam]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_a_script_edits(kind: Any) -> None:
    """Momenta are formed with the decay of the group in which a parameter is now."""
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    own = kind([{"params": [first], "betas": (0.5, 0.9)}, {"params": [second, third], "betas": (0.8, 0.9)}])
    for param in (first, second, third):
        param.grad = torch.ones(2)
    own.step()

    def momentum(param: nn.Parameter) -> float:
        value = torch.full((2,), 3.0)
        own.to_momentum([param], [value])
        moment, decay = float(own.state[param]["exp_avg"][0]), float(own.flat_momenta([param])[0][1])
        assert float(value[0]) == pytest.approx(decay * moment + (1 - decay) * 3)
        return decay

    assert [momentum(param) for param in (first, second, third)] == [0.5, 0.8, 0.8]
    replaced = nn.Parameter(torch.ones(2))
    own.state[replaced] = own.state.pop(second)
    own.param_groups[1]["params"] = [third, replaced]
    assert momentum(replaced) == momentum(third) == 0.8
    own.param_groups[0]["params"], own.param_groups[1]["params"] = [third, first], [replaced]
    assert [momentum(param) for param in (first, replaced, third)] == [0.5, 0.8, 0.5]
    del own.param_groups[0]
    assert momentum(replaced) == 0.8
    with pytest.raises(RuntimeError, match=rf"{kind.__name__}.*shape \(2,\).*in none of its parameter groups"):
        momentum(first)
