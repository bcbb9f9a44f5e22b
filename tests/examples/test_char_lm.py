"""The language model learns; killed half-way and started again, it makes the losses of one that was not."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.scripts import ROOT, start
from tests.rank_pool import RankPool

SMALL = ["--width", "16", "--layers", "1", "--heads", "2", "--context", "16", "--batch-size", "4", "--device", "cpu"]
STEPS, EVERY, KILLED_AFTER = 11, 3, 7


def load_script() -> ModuleType:
    """Import examples/char_lm.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("char_lm", ROOT / "examples" / "char_lm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(folder: Path, algorithm: str, steps: int = STEPS) -> list[str]:
    files = ["--checkpoint", str(folder / "checkpoint"), "--curve", str(folder / "curve.jsonl")]
    return [*SMALL, *files, "--algorithm", algorithm, "--steps", str(steps), "--every", str(EVERY)]


def curve(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


class Crash(Exception):
    """Something that the script does not expect."""


def run_script(arguments: list[str], crash_after: int | None) -> str:
    """On a rank: run the script, maybe until it crashes in the middle of a step."""
    script = load_script()
    made = iter(range(1, 1000))
    mean_over_ranks = script.mean_over_ranks

    def mean(loss: object) -> float:
        if next(made) == crash_after:
            raise Crash
        return mean_over_ranks(loss)

    setattr(script, "mean_over_ranks", mean)  # noqa: B010
    try:
        script.main(arguments)
    except Crash:
        return "crashed"
    return "done"


@pytest.mark.parametrize(
    "algorithm", ["low_precision_decentralized", pytest.param("power_sgd", marks=pytest.mark.slow)]
)
def test_a_resumed_run_makes_the_same_losses(algorithm: str, pool: RankPool, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert pool.run(2, run_script, words(whole, algorithm), None) == ["done"] * 2
    assert pool.run(2, run_script, words(broken, algorithm), KILLED_AFTER + 1) == ["crashed"] * 2
    assert [step for step, _ in curve(broken)] == list(range(1, KILLED_AFTER + 1))
    assert pool.run(2, run_script, words(broken, algorithm), None) == ["done"] * 2
    assert [step for step, _ in curve(whole)] == list(range(1, STEPS + 1))
    assert curve(broken) == curve(whole), "bit for bit"


def environment() -> dict[str, str]:
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    plain = {name: value for name, value in os.environ.items() if name not in job}
    return {**plain, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]])
def test_killed_and_started_again(launcher: list[str], tmp_path: Path) -> None:
    whole, broken, steps = tmp_path / "whole", tmp_path / "broken", 60
    program = [*launcher, "examples/char_lm.py"]
    done = start(*program, *words(whole, "bytegrad", steps))
    assert done.returncode == 0, done.stderr
    command = [sys.executable, *program, *words(broken, "bytegrad", steps)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 100
    while not (broken / "curve.jsonl").exists() or len(curve_so_far(broken)) <= KILLED_AFTER:
        assert process.poll() is None and time.monotonic() < deadline, "it ended too early, or does not come on"
        time.sleep(0.01)
    ranks = children(process.pid)
    assert bool(launcher) == bool(ranks)
    for pid in (process.pid, *ranks):  # the launcher first, or it would end the others in order
        os.kill(pid, signal.SIGKILL)
    process.wait(60)
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    seen = len(curve_so_far(broken))
    assert seen < steps, "it was through before it was killed"
    again = start(*program, *words(broken, "bytegrad", steps))
    assert again.returncode == 0, again.stderr
    assert "goes on after step" in again.stdout
    assert curve(broken) == curve(whole), "bit for bit"


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    fields = [(int(stat.split(" ", 1)[0]), int(stat.rsplit(")", 1)[1].split()[1])) for stat in stats]
    return [child for child, parent in fields if parent == pid]


def curve_so_far(folder: Path) -> list[str]:
    return (folder / "curve.jsonl").read_text().splitlines()


@pytest.mark.slow
def test_it_learns(pool: RankPool, tmp_path: Path) -> None:
    arguments = words(tmp_path, "bytegrad", 120)
    assert pool.run(2, run_script, arguments, None, timeout_s=100) == ["done"] * 2
    losses = [loss for _, loss in curve(tmp_path)]
    assert losses[0] > 4.5
    assert sum(losses[-10:]) / 10 < 3.5
