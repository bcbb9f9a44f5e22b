"""State of FSDP's replicas that was saved by other ranks: fitted, or refused by name before it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bagua.codecs import Int4
from bagua.comm.groups import Groups
from bagua.exchanges import Exchange, Hierarchical, ScatterGather, State
from bagua.interop.fsdp_replica import Replica
from tests.rank_threads import run_threads

N = 96
FEEDBACK = ScatterGather(Int4(), error_feedback=True)
SITES = ["a:0", "a:1", "b:2", "b:3"]


class OneParameter:
    """What `ReducedParams` says of a module with the one parameter "weight"."""

    def of_shard(self, num_elements: int) -> tuple[str, ...]:
        return ("weight",)

    def names_of(self, saved: list[str], path: str) -> tuple[str, ...]:
        assert saved == ["weight"]
        return ("weight",)


def reduce(groups: Groups, exchange: Exchange, saved: list[State]) -> tuple[Tensor, State] | str:
    """The mean of gradients with a state that was loaded, and the state then; or why it was refused."""
    params: Any = OneParameter()
    replica = Replica(lambda tensors: exchange, groups, params)
    replica.load([{"parameters": ["weight"], "tensors": saved[groups.rank]}], "")
    x_N = torch.full((N,), 1.0 + groups.rank)
    try:
        replica(x_N)
    except (ValueError, RuntimeError) as error:  # ranks that have nothing to refuse lose their peers
        return str(error)
    return x_N, replica.states["weight",]


def made(groups: Groups, exchange: Exchange, gathers: bool = False) -> State:
    return exchange.init(torch.zeros(N), groups.as_of(gathers))


@pytest.mark.parametrize("nodes", [SITES, ["a:0", "a:1", "a:2", "b:3"]])
def test_what_the_same_ranks_have_saved_is_used(nodes: list[str]) -> None:
    exchange = Hierarchical(FEEDBACK)
    saved = run_threads(4, made, exchange, nodes=nodes, hierarchical=True)
    for found in run_threads(4, reduce, exchange, saved, nodes=nodes, hierarchical=True):
        assert not isinstance(found, str)
        torch.testing.assert_close(found[0], torch.full((N,), 2.5), rtol=0.1, atol=0)


@pytest.mark.parametrize(("old", "new"), [(SITES, ["a:0", "b:1", "a:2", "b:3"]), (SITES, ["a:0", "a:0", "b:1", "b:1"])])
def test_other_sites_are_refused(old: list[str], new: list[str]) -> None:
    exchange = Hierarchical(FEEDBACK)
    saved = run_threads(4, made, exchange, nodes=old, hierarchical=True)
    said = run_threads(4, reduce, exchange, saved, nodes=new, hierarchical=True)
    assert any(isinstance(each, str) and "the ranks were at other sites" in each for each in said)


def test_a_residual_of_another_length_is_refused() -> None:
    saved = [{"residual": torch.zeros(N // 2)} for _ in range(2)]
    for found in run_threads(2, reduce, FEEDBACK, saved, nodes=[0, 1]):
        assert found == f"state for gradients of {N} elements: residual has shape [48], not [96]"


def test_errors_of_all_owners_become_those_of_each() -> None:
    saved = run_threads(3, made, FEEDBACK, True, nodes=[0, 1, 2])
    chunk = saved[0]["chunk_residual"].numel() // 3
    for found in run_threads(3, reduce, FEEDBACK, saved, nodes=[0, 1, 2]):
        assert not isinstance(found, str) and found[1]["chunk_residual"].numel() == chunk
