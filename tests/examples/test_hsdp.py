"""The example of hybrid sharding learns over both backends, and says what it saved."""

from __future__ import annotations

import contextlib
import io
import os
import re

import pytest
import torch.distributed as dist

from tests.examples.scripts import load_script, start
from tests.ports import free_port
from tests.rank_pool import RankPool

SMALL = ["--steps", "4", "--every", "2", "--context", "16", "--layers", "1", "--width", "64", "--batch-size", "2"]


def run_script(words: list[str]) -> str:
    """On a rank: run the script; return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        load_script("hsdp").main([*SMALL, *words])
    return printed.getvalue()


def check_output(text: str) -> None:
    """It learns, and has sent a quarter."""
    lines = text.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert len(losses) == 2 and losses[1] < losses[0] < 6
    (told,) = [line for line in lines if "times fewer" in line]
    ratio = re.search(r"([\d.]+) times fewer", told)
    assert ratio is not None and float(ratio[1]) >= 3.9


@pytest.mark.parametrize("backend", ["bagua:uint8:min_bytes=4096", "gloo"])
def test_two_replicas(backend: str, pool: RankPool) -> None:
    pool.run(2, run_script, ["--backend", backend])


def run_as_launched(words: list[str]) -> str:
    """With the environment that torchrun makes, and nothing initialised."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"]
    try:
        return run_script(words)
    finally:
        dist.destroy_process_group()


def test_as_under_a_launcher(pool: RankPool) -> None:
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, second = pool.run(2, run_as_launched, ["--backend", "bagua:uint8"], env=env, init=False)
    check_output(first)
    assert second == ""


@pytest.mark.slow
def test_under_torchrun() -> None:
    done = start(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/hsdp.py", "--backend", "bagua:uint8"),
        *SMALL,
    )
    assert done.returncode == 0, done.stderr
    check_output(done.stdout)


def test_ranks_that_cannot_be_divided(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match="--replicas 3: 2 ranks cannot be divided among them"):
        pool.run(2, run_script, ["--replicas", "3"])
