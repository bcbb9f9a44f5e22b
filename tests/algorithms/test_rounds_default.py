"""Rounds of local_sgd and diloco: their defaults depend on which options are given; local_sgd with codecs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import bagua
from bagua.algorithms import Algorithm, DiLoCo, LocalSGD
from bagua.algorithms.rounds import interval_of
from bagua.comm.team import Team
from tests.algorithms.quadratic import Quadratic, targets
from tests.algorithms.test_diloco import follow
from tests.daily import one_in
from tests.rank_threads import run_teams

SGD = partial(torch.optim.SGD, lr=0.05)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
LONG = LocalSGD(8, codec="identity"), DiLoCo(8, 0.7, 0.5, True, "int4")
SHORT = LocalSGD(2, codec="minmax_uint8"), DiLoCo(3, 1.0, 0.0, False, "eden:bits=3")


def test_rounds_are_short_by_default() -> None:
    """These were measured: see docs/algorithms/local_sgd.md and diloco.md before you change one."""
    assert (LocalSGD(), DiLoCo()) == SHORT
    assert repr(LocalSGD()).startswith("LocalSGD(communication_interval=2, hierarchical=None, codec='minmax_uint8', ")
    assert [interval_of(each) for each in (*SHORT, *LONG, bagua.algorithms.ByteGrad())] == [2, 3, 8, 8, 1]


@pytest.mark.parametrize(
    ("given", "fitted"),
    [
        (LocalSGD(4), LocalSGD(4, codec="identity")),
        (LocalSGD(codec="int4"), LocalSGD(8, codec="int4")),
        (DiLoCo(100), DiLoCo(100, 0.7, 0.5, True, "int4")),
        (DiLoCo(codec="identity"), DiLoCo(8, 0.7, 0.5, True, "identity")),
        (DiLoCo(outer_momentum=0.9), DiLoCo(8, 0.7, 0.9, True, "int4")),
        (DiLoCo(outer_momentum=0.0), DiLoCo(8, 0.7, 0.0, False, "int4")),
        (DiLoCo(fragments=4), DiLoCo(8, 0.7, 0.5, True, "int4", fragments=4)),
        (DiLoCo(mixing=0.25), DiLoCo(8, 0.7, 0.5, True, "int4", mixing=0.25)),
        (DiLoCo(delay=3), DiLoCo(8, 0.7, 0.5, True, "int4", delay=3)),
    ],
    ids=repr,
)
def test_an_option_that_is_given_decides_on_the_others(given: Algorithm, fitted: Algorithm) -> None:
    assert given == fitted


def rounds_of(team: Team, algorithm: str, make: Any) -> tuple[int, tuple[str, ...], str]:
    """Launches of eight steps, notices, and the algorithm."""
    model = Quadratic()
    optimizer = make(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.tensor(targets(2, step)[team.rank], dtype=torch.float32)).backward()
        optimizer.step()
    stats = bagua.stats(model)
    bagua.detach(model)
    return stats.total.launches, stats.notices, stats.algorithm


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_rounds_of_each_optimizer(name: str) -> None:
    """As many with SGD as with Adam, whose moments are set, too."""
    for make, notes in ((SGD, 0), (ADAMW, 1)):
        for launches, notices, _ in run_teams(2, rounds_of, name, make):
            assert launches == {"local_sgd": 4, "diloco": 2}[name]
            assert len(notices) == notes and all("(mean_moments)" in each for each in notices)


@pytest.mark.parametrize(("size", "codec"), one_in(2, [1, 2, 3, 8], ["minmax_uint8", "int4", "eden:bits=2"]))
def test_local_sgd_with_a_codec_is_diloco_with_a_plain_outer_step(size: int, codec: str) -> None:
    """Bit for bit; and close to the average of the weights themselves."""
    coded = run_teams(size, follow, LocalSGD(3, codec=codec))
    outer = run_teams(size, follow, DiLoCo(3, codec=codec, **PLAIN))
    exact = run_teams(size, follow, LocalSGD(3))
    for (seen, anchors, _), (wanted, their, _) in zip(coded, outer, strict=True):
        assert np.array_equal(seen, wanted) and np.array_equal(anchors, their)
    ends = [seen[2::3] for seen, _, _ in coded]
    assert all(np.array_equal(end, ends[0]) for end in ends), "replicas are equal after a round"
    if size > 1:
        drift = max(np.abs(seen[:2] - seen[2]).max() for seen, _, _ in exact)
        worst = max(np.abs(a[0] - b[0]).max() for a, b in zip(coded, exact, strict=True))
        assert 0 < worst < (1.0 if "eden" in codec else 0.2) * drift * size


def follow_adamw(team: Team, algorithm: Algorithm) -> tuple[np.ndarray, set[str]]:
    """Weights after 20 steps, and names of what is kept."""
    model = Quadratic()
    optimizer = ADAMW(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    for step in range(20):
        optimizer.zero_grad()
        model(torch.tensor(targets(2, step)[team.rank], dtype=torch.float32)).backward()
        optimizer.step()
    kept = {each["name"] for each in bagua.state_dict(model)["tensors"]}
    bagua.detach(model)
    return torch.cat([each.detach().view(-1) for each in model.parameters()]).numpy(), kept


def test_second_moments_are_scaled_with_a_codec_too() -> None:
    codec = "minmax_uint8"
    coded = run_teams(2, follow_adamw, LocalSGD(2, codec=codec, scale_second_moment=True))
    outer = run_teams(2, follow_adamw, DiLoCo(2, codec=codec, **PLAIN, scale_second_moment=True))
    plain = run_teams(2, follow_adamw, LocalSGD(2, codec=codec))
    for (seen, kept), (wanted, _), (other, _) in zip(coded, outer, plain, strict=True):
        assert np.array_equal(seen, wanted) and not np.array_equal(seen, other)
        assert {"anchor", "second_moment"} <= kept


def test_local_sgd_with_a_codec_goes_on_from_a_checkpoint() -> None:
    algorithm = LocalSGD(4, codec="int4")
    whole, resumed = (run_teams(2, partial(follow, stop=stop), algorithm) for stop in (0, 6))
    for (a, _, _), (b, _, _) in zip(whole, resumed, strict=True):
        assert np.array_equal(a, b)


def test_nodes_are_summed_first_by_default_with_a_codec() -> None:
    nodes = ((0, 1), (2, 3))
    for codec, hierarchical in ((None, True), ("identity", False), ("bf16", False), ("minmax_uint8", True)):
        fitted, remark = LocalSGD(codec=codec).for_nodes(nodes)
        assert isinstance(fitted, LocalSGD) and fitted.hierarchical is hierarchical and not remark
