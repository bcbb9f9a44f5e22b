"""The tour of the primitives misses none, and is right on any number of ranks."""

from __future__ import annotations

import importlib
import os
import re

import pytest
import torch

from bagua.torch_api import primitives
from tests.examples.scripts import ROOT
from tests.rank_pool import RankPool

SCRIPT = ROOT / "examples" / "communication_primitives.py"


def run_script(argv: list[str], of_node: int | None = None) -> None:
    """On a rank: run the script; `of_node` ranks are on each node."""
    if of_node is not None:
        rank = torch.distributed.get_rank() % of_node
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(of_node)}
    importlib.import_module("examples.communication_primitives").main(argv)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_one_node(pool: RankPool, size: int) -> None:
    pool.run(size, run_script, [])


def test_two_nodes(pool: RankPool) -> None:
    pool.run(4, run_script, [], 2, nodes=[0, 0, 1, 1])


def test_all_are_there() -> None:
    text = SCRIPT.read_text()
    for name in (name for name in primitives.__all__ if name != "ReduceOp"):
        assert re.search(rf"bagua\.{name}\(", text), f"{name} is missing"
    for op in primitives.ReduceOp:
        assert f"ReduceOp.{op.name}" in text, f"{op.name} is missing"
