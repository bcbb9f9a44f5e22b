"""Weights that are loaded in mid-training: algorithms with state of those before say so."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch

import bagua
from bagua.algorithms import Algorithm, AsyncModelAverage
from bagua.algorithms.async_model_average import _Rounds
from bagua.comm.team import Team
from bagua.contrib import DecoupledDiLoCo
from bagua.engine.hooks import attachments
from bagua.optim.zero_one_adam import ZeroOneAdam
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams, teams

TEXT = "the model's weights were loaded in mid-training"


def make(algorithm: str, **options: Any) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (team,) = teams(1)
    bagua.distribute(model, optimizer, algorithm, process_group=team, **options)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def told(model: torch.nn.Module) -> int:
    return sum(TEXT in each for each in bagua.stats(model).notices)


@pytest.mark.parametrize(
    ("algorithm", "warns"),
    [("gradient_allreduce", 0), ("bytegrad", 0), ("local_sgd", 1), ("diloco", 1), ("decentralized", 1)],
)
def test_loading_in_mid_training(algorithm: str, warns: int, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make(algorithm)
    model.load_state_dict(torch.nn.Linear(4, 4).state_dict())
    step(model, optimizer)
    assert told(model) == 0, "before the first step the state is made anew"
    with caplog.at_level(logging.WARNING):
        model.load_state_dict(torch.nn.Linear(4, 4).state_dict())
        step(model, optimizer)
    assert told(model) == caplog.text.count(f"{TEXT}, and {algorithm} keeps") == warns
    model.load_state_dict(model.state_dict())
    step(model, optimizer)
    assert told(model) == warns, "it is said once"


STARTS = [
    ("diloco", {"communication_interval": 2, "outer_momentum": 0.5}),
    ("sparse_loco", {"communication_interval": 2}),
    ("local_sgd", {"communication_interval": 2}),
    ("local_sgd", {"communication_interval": 2, "codec": "minmax_uint8"}),
    ("low_precision_decentralized", {}),
    ("decentralized", {}),
    ("decentralized", {"topology": "ring", "codec": "minmax_uint8"}),
    ("zero_one_adam", {}),
]


@pytest.mark.parametrize(("algorithm", "options"), STARTS, ids=str)
def test_weights_loaded_before_the_first_step_are_those_that_train(
    pool: RankPool, algorithm: str, options: dict[str, Any]
) -> None:
    """As scripts for `DistributedDataParallel` load them, after it was made; a part of them, or with `copy_`."""
    pool.run(2, load_before_the_first_step, algorithm, options)


def load_before_the_first_step(algorithm: str, options: dict[str, Any]) -> None:
    source = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with torch.no_grad():
        for number, param in enumerate(source.parameters()):
            param.copy_(torch.linspace(-1, 1 + number, param.numel()).view_as(param))
    made = ZeroOneAdam if algorithm == "zero_one_adam" else torch.optim.Adam
    trained = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    trained.load_state_dict(source.state_dict())
    used = made(trained.parameters(), lr=0.01)
    step(trained, used)
    weights, moments = copy.deepcopy((trained.state_dict(), used.state_dict()))
    found: dict[str, list[torch.Tensor]] = {}
    for way in ("before", "root", "parts", "copy", "data"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = made(model.parameters(), lr=0.01)
        if way == "before":
            model.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(moments))
        bagua.distribute(model, optimizer, algorithm, **options)
        if way == "root":
            model.load_state_dict(weights)
        elif way == "parts":
            for number, part in enumerate(model):
                part.load_state_dict({name: weights[f"{number}.{name}"] for name in ("weight", "bias")})
        else:
            with torch.no_grad():
                for name, param in model.named_parameters():
                    (param.data if way == "data" else param).copy_(weights[name])
        if way != "before":
            optimizer.load_state_dict(copy.deepcopy(moments))
        for number in range(5):
            model(torch.full((2, 4), 1.0 + number + torch.distributed.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        bagua.average_parameters(model)
        found[way] = [param.detach().clone() for param in model.parameters()]
        assert told(model) == 0
        bagua.detach(model)
    for way, params in found.items():
        for param, expected in zip(params, found["before"], strict=True):
            assert torch.equal(param, expected), way


@pytest.mark.parametrize("algorithm", [AsyncModelAverage(codec="minmax_uint8"), DecoupledDiLoCo()])
def test_the_base_of_rounds_in_the_background(pool: RankPool, algorithm: Algorithm) -> None:
    pool.run(2, load_and_look_at_the_base, algorithm)


def load_and_look_at_the_base(algorithm: Algorithm) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    bagua.distribute(model, optimizer, algorithm)
    weights = torch.nn.Linear(4, 4).state_dict()
    model.load_state_dict(weights)
    engine = attachments[model].engine
    assert engine.buckets
    model(torch.ones(2, 4)).square().mean().backward()
    if isinstance(algorithm, DecoupledDiLoCo):
        for bucket in engine.buckets:
            assert torch.equal(engine.memory.tensor("anchor", bucket), bucket.flat)
    else:
        assert engine.context.keep("rounds", _Rounds).whole
    for _ in range(4):
        step(model, optimizer)
    bagua.average_parameters(model)
    torch.testing.assert_close(model.weight.detach(), weights["weight"])
    bagua.detach(model)


def test_ranks_that_begin_with_different_weights_meet() -> None:
    """The anchor is still what `distribute` made equal: what they differ in counts as learnt."""
    found = run_teams(2, different_weights)
    assert torch.equal(*found)


def different_weights(team: Team) -> torch.Tensor:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    bagua.distribute(model, optimizer, "diloco", process_group=team, communication_interval=2)
    with torch.no_grad():
        model.weight.fill_(1.0 + team.rank)
    for _ in range(4):
        step(model, optimizer)
    assert "begin with different weights" in str(bagua.stats(model).notices)
    bagua.detach(model)
    return model.weight.detach()


def test_a_part_that_is_loaded_in_mid_training() -> None:
    (team,) = teams(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, "diloco", process_group=team)
    step(model, optimizer)
    model[1].load_state_dict(torch.nn.Linear(4, 4).state_dict())
    step(model, optimizer)
    assert told(model) == 1


def test_weights_that_are_exchanged_for_an_evaluation_and_back() -> None:
    """Those of a moving average: what trains is what it was."""
    model, optimizer = make("diloco")
    average = torch.nn.Linear(4, 4).state_dict()
    step(model, optimizer)
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(average)
    model.eval()
    model(torch.ones(2, 4))
    model.train()
    model.load_state_dict(own)
    step(model, optimizer)
    assert told(model) == 0


def test_with_the_state_of_the_algorithm_nothing_is_said() -> None:
    model, optimizer = make("diloco")
    step(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), bagua.state_dict(model)))
    step(model, optimizer)
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    bagua.load_state_dict(model, before[2])
    step(model, optimizer)
    assert told(model) == 0


def test_copies_are_plain_modules() -> None:
    model, optimizer = make("local_sgd")
    step(model, optimizer)
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        plain.load_state_dict(model.state_dict())
    bagua.detach(model)
    model.load_state_dict(model.state_dict())
    assert not model._load_state_dict_pre_hooks
