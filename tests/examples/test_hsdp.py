"""The example of hybrid sharding learns over both backends, and says what it saved."""

from __future__ import annotations

import re

import pytest

from tests.examples.scripts import load_script, start
from tests.rank_pool import RankPool

SMALL = ["--steps", "4", "--every", "2", "--context", "16", "--layers", "1", "--width", "64", "--batch-size", "2"]


def run_script(words: list[str]) -> None:
    load_script("hsdp").main([*SMALL, *words])


@pytest.mark.parametrize("backend", ["bagua:uint8:min_bytes=4096", "gloo"])
def test_two_replicas(backend: str, pool: RankPool) -> None:
    pool.run(2, run_script, ["--backend", backend])


def test_under_torchrun() -> None:
    done = start(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/hsdp.py", "--backend", "bagua:uint8"),
        *SMALL,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert len(losses) == 2 and losses[1] < losses[0] < 6
    (told,) = [line for line in lines if "times fewer" in line]
    ratio = re.search(r"([\d.]+) times fewer", told)
    assert ratio is not None and float(ratio[1]) >= 3.9


def test_ranks_that_cannot_be_divided(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match="--replicas 3: 2 ranks cannot be divided among them"):
        pool.run(2, run_script, ["--replicas", "3"])
