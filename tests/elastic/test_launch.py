"""Real launchers: a rank is killed, the launcher is told to end, the host of the rendezvous is lost."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import bagua
from bagua.elastic import Sampler
from bagua.lab import Cluster, LabError
from tests import pids
from tests.fork_server import ForkServer
from tests.launch.launching import RUN, Launcher, launch_forked, script
from tests.ports import free_ports

pytestmark = pytest.mark.process

PRELOADS = ("--preload", "torch,bagua")  # or each rank would import them
TRAIN = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import bagua
from bagua import elastic
def say(text):
    sys.stdout.write(text + "\\n")  # in one piece: ranks share the pipe
bagua.init_process_group(init_method="env://", timeout=timedelta(seconds=30))
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
bagua.distribute(model, optimizer, "gradient_allreduce")
sampler = elastic.Sampler(range(240))
with elastic.State(model, optimizer, sampler, steps=0, directory=os.environ.get("DIRECTORY"), disk_every=1000) as state:
    restored = state.restore()
    first = restored is None
    say(f"restored {restored} at {state.steps} of {size}")
    say("restarts " + os.environ["TORCHELASTIC_RESTART_COUNT"])
    sampler.set_epoch(0)
    loader = torch.utils.data.DataLoader(range(240), batch_size=4, sampler=sampler)
    for batch in sampler.track(loader):
        model(torch.ones(4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.steps += 1
        say(f"used {state.steps} {batch.tolist()}")
        open(os.path.join(os.environ["PIDS"], str(os.getpid())), "w").close()  # it trains
        if first and rank == 1 and state.steps == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(os.environ.get("PAUSE", "0")))
        if state.steps % 3 == 0:
            state.commit()
    state.commit()
    say(f"ended {state.steps} {state.number}")
bagua.destroy_process_group()
"""


def used(out: str) -> Counter[int]:
    """How often samples were used."""
    lines = [line.split(" ", 2) for line in out.splitlines() if line.startswith("used ")]
    return Counter(index for _, _, indices in lines for index in json.loads(indices))


def test_a_killed_rank_costs_what_was_after_the_commit(fork_server: ForkServer, tmp_path: Path) -> None:
    """The second rank dies after its fifth step; both start again from the third, in the memory of the launcher."""
    path = script(tmp_path, TRAIN)
    words = (*RUN, *PRELOADS, "--nproc-per-node", "2", "--max-restarts", "1", path)
    ended = launch_forked(fork_server, tmp_path, *words, env={"KILL_AT": "5"})
    assert ended.code == 0, ended.err
    assert ended.out.count("restored None at 0 of 2") == 2
    assert ended.out.count("restored Restored(number=1, size=2, source='memory') at 3 of 2") == 2
    assert ended.out.count("ended 30 11") == 2  # 30 steps, a commit at every third and one at the end
    counts = used(ended.out)
    assert len(counts) == 240 and set(counts.values()) == {1, 2}
    twice = [index for index, count in counts.items() if count == 2]
    assert len(twice) in (2 * 2 * 4, 2 * 2 * 4 - 4)  # steps 4 and 5, of which the other rank may not have said the last


def test_sigterm_commits_and_nothing_is_lost(tmp_path: Path) -> None:
    """The launcher is told to end. What is on the disk then is of the very last step, and knows what is left."""
    path = script(tmp_path, TRAIN)
    env = {"DIRECTORY": str(tmp_path / "commits"), "PAUSE": "0.1"}
    launcher = Launcher(tmp_path, (*RUN, *PRELOADS, "--nproc-per-node", "2", path), env)
    launcher.wait_for_ranks(2)
    launcher._process.terminate()
    ended = launcher.wait()
    assert ended.code == 128 + signal.SIGTERM, ended.err
    last = max(int(line.split()[1]) for line in ended.out.splitlines() if line.startswith("used "))
    assert 0 < last < 30
    sampler = Sampler(range(240), num_replicas=1, rank=0)
    loaded = bagua.checkpoint.load(tmp_path / "commits", {"sampler": sampler})
    assert loaded is not None and loaded.data["steps"] == last
    assert used(ended.out) + Counter(sampler) == Counter(range(240))


@pytest.mark.slow
def test_the_launcher_that_serves_the_rendezvous_is_killed(tmp_path: Path) -> None:
    """Two launchers on this machine stand for two hosts. The first dies with its rank; the other one goes on alone."""
    path = script(tmp_path, TRAIN)
    endpoints = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    words = (
        *(*RUN, "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", endpoints, "--rdzv-id", "job", "--local-addr", "127.0.0.1", "--rdzv-conf"),
        *("last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3", path),
    )
    folders = [tmp_path / "first", tmp_path / "second"]
    launchers = []
    for folder in folders:
        folder.mkdir()
        launchers.append(Launcher(folder, words, {"PAUSE": "0.15"}))
        time.sleep(0.5)
    for launcher in launchers:
        launcher.wait_for_ranks(1)
    time.sleep(2)
    kill(launchers[0])
    ended = launchers[1].wait(120)
    assert ended.code == 0, ended.err
    assert "of 2" in ended.out and "source='memory'" in ended.out and "of 1" in ended.out
    assert "bagua run: 1 of 2 hosts take part, 2 before" in ended.err
    with contextlib.suppress(AssertionError):
        launchers[0].wait(60)


@pytest.mark.slow
def test_a_host_returns_to_the_only_endpoint(tmp_path: Path) -> None:
    """The launchers count restarts differently then: 1 and 0. torch's own rendezvous, not one that moves."""
    path = script(tmp_path, TRAIN)
    (port,) = free_ports(1)
    words = (
        *(*RUN, "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job", "--local-addr", "127.0.0.1", "--rdzv-conf"),
        *("last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=60", path),
    )
    folders = [tmp_path / name for name in ("first", "second", "again")]
    for folder in folders:
        folder.mkdir()
    first = Launcher(folders[0], words, {"PAUSE": "0.5"})
    time.sleep(1)
    second = Launcher(folders[1], words, {"PAUSE": "0.5"})
    for launcher in (first, second):
        launcher.wait_for_ranks(1)
    time.sleep(2)
    kill(second)
    with contextlib.suppress(AssertionError):
        second.wait(60)
    first.wait_for_ranks(2)  # it goes on alone
    again = Launcher(folders[2], words, {"PAUSE": "0.1"})
    returned, ended = again.wait(120), first.wait(120)
    assert (ended.code, returned.code) == (0, 0), ended.err + returned.err
    last = [line for line in ended.out.splitlines() if line.startswith(("restored", "restarts"))][-2:]
    assert last[0].endswith("of 2") and "source='memory'" in last[0] and last[1] == "restarts 1"
    assert "restarts 0" in returned.out and "ended" in returned.out


def kill(launcher: Launcher) -> None:
    """The launcher and its ranks, which it cannot take with it."""
    launcher._process.kill()
    for pid in launcher.pids.iterdir():
        pids.kill(int(pid.name), PIDS=str(launcher.pids))


@pytest.fixture(scope="module")
def cluster() -> None:
    """For tests on emulated hosts."""
    try:
        with Cluster(1, mode="namespaces"):
            return
    except LabError as error:
        pytest.skip(f"no cluster on this machine: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["kill-rank", "kill-host", "kill-host-0", "host-returns"])
def test_an_accident_in_a_cluster(cluster: None, scenario: str) -> None:
    """Every image of every epoch once, at most one commit interval lost; see the benchmark."""
    from benchmarks.elastic.judge import COMMIT_EVERY
    from benchmarks.elastic.training import run

    result = run(scenario, 100, epochs=4, limit_s=200)
    assert result.problems == [] and not result.hung
    assert result.lost_steps and max(result.lost_steps) <= COMMIT_EVERY
    assert result.accuracy is not None and result.accuracy > 0.9


@pytest.mark.slow
def test_a_host_that_is_killed_while_it_is_taken_in(tmp_path: Path) -> None:
    """It counts as one of three, and never says how many ranks it has. The others go on, and take it in next time."""
    path = script(tmp_path, TRAIN)
    endpoints = ",".join(f"127.0.0.1:{port}" for port in free_ports(3))
    config = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=90,read_timeout=5"
    words = (
        *(*RUN, "--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", endpoints, "--rdzv-id", "job", "--local-addr", "127.0.0.1", "--rdzv-conf", config, path),
    )
    folders = [tmp_path / name for name in ("first", "second", "again")]
    for folder in folders:
        folder.mkdir()
    launchers = []
    for folder in folders[:2]:
        launchers.append(Launcher(folder, words, {"PAUSE": "2"}))
        time.sleep(1)
    for launcher in launchers:
        launcher.wait_for_ranks(1)
    ghost = subprocess.run([sys.executable, str(Path(__file__).parent / "ghost.py"), endpoints, config], timeout=120)
    assert ghost.returncode == 9
    again = Launcher(folders[2], words, {"PAUSE": "0.1"})
    launchers.append(again)
    ended = [launcher.wait(150) for launcher in launchers]
    assert [each.code for each in ended] == [0, 0, 0], [each.err for each in ended]
    assert "of 3" in ended[2].out and "source='memory'" in ended[2].out
