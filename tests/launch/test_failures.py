"""A rank that fails, a rank that is killed, Ctrl-C, and a restart."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from bagua.distributed.failures import FirstFailure
from tests.launch.launching import INIT, RUN, Launcher, launch, script

# Rank 0 and 2 fail only because rank 1 did, all within one second, which torchrun cannot tell apart.
BOOM = (
    INIT
    + """
dist.barrier()
if rank == 1:
    raise ValueError("boom")
dist.all_reduce(torch.ones(8))
"""
)
KILLED = (
    INIT
    + """
import signal
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(8))
"""
)
# Rank 0 of two sits in a receive, in C++; rank 1 in Python.
WAITING = (
    INIT
    + """
if rank == 0 and dist.get_world_size() > 1:
    dist.recv(torch.ones(1), src=1)
time.sleep(600)
"""
)
RESTARTED = (
    INIT
    + """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
x = torch.ones(8)
dist.all_reduce(x)
assert x[0] == dist.get_world_size()
if attempt == 0:
    sys.exit(7 if rank == 1 else 0)
sys.stdout.write(f"attempt {attempt} ended\\n")  # one write: ranks share the stream
"""
)


def test_the_first_failing_rank_is_shown(tmp_path: Path) -> None:
    ended = launch(tmp_path, *RUN, "--nproc-per-node", "2", script(tmp_path, BOOM))
    assert ended.code == 1
    root = ended.err.partition("Root Cause")[2]
    assert "rank      : 1" in root
    assert "ValueError: boom" in root
    assert 'raise ValueError("boom")' in root, "the traceback, not only the message"
    assert "[rank1]: ValueError: boom" in ended.err


@pytest.mark.slow
def test_a_killed_rank_is_the_first(tmp_path: Path) -> None:
    ended = launch(tmp_path, *RUN, "--nproc-per-node", "2", script(tmp_path, KILLED))
    assert ended.code == 1
    root = ended.err.partition("Root Cause")[2]
    assert "rank      : 1" in root
    assert "SIGKILL" in root


def test_a_rank_that_fails_before_it_joins(tmp_path: Path) -> None:
    ended = launch(tmp_path, *RUN, "--nproc-per-node", "1", script(tmp_path, "import no_such_module_at_all"))
    assert ended.code == 1
    assert "No module named 'no_such_module_at_all'" in ended.err
    assert "exit code 1, no traceback on record" in ended.err


def test_interrupt_ends_every_rank(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, [*RUN, "--nproc-per-node", "2", script(tmp_path, WAITING)])
    launcher.wait_for_ranks(2)
    time.sleep(0.5)
    launcher.interrupt()
    ended = launcher.wait()
    assert ended.code == 130, ended.err
    assert "ended by SIGINT" in ended.err
    assert ended.seconds < 90, f"took {ended.seconds:.1f} s"


def test_a_launcher_under_nohup_outlives_its_terminal_and_can_be_interrupted(tmp_path: Path) -> None:
    before = ("sh", "-c", 'trap "" INT HUP; exec "$@"', "sh")
    launcher = Launcher(tmp_path, [*RUN, "--nproc-per-node", "1", script(tmp_path, WAITING)], before=before)
    launcher.wait_for_ranks(1)
    launcher.hang_up()
    time.sleep(0.5)
    launcher.interrupt()
    ended = launcher.wait()
    assert ended.code == 130, ended.err
    assert "ended by SIGINT" in ended.err


@pytest.mark.slow
def test_a_restart_works_on_gloo(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", "--max-restarts", "1")
    ended = launch(tmp_path, *RUN, *words, script(tmp_path, RESTARTED))
    assert ended.code == 0, ended.err
    assert ended.out.count("attempt 1 ended") == 2


def failure(tmp: Path, rank: int, exitcode: int, at: float | None, peer_lost: bool = False) -> ProcessFailure:
    """What torchrun keeps of a rank; `at` None for a rank that left no file."""
    path = tmp / f"{rank}.json"
    if at is not None:
        extra = {"py_callstack": f"traceback {rank}", "timestamp": str(int(at))}
        extra |= {"time_ns": int(at * 1e9), "peer_lost": peer_lost}  # type: ignore[dict-item]
        path.write_text(json.dumps({"message": {"message": "m", "extraInfo": extra}}))
    return ProcessFailure(rank, 100 + rank, exitcode, str(path))


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: (1, 0.9, False), 1: (1, 0.2, False)}, 1),
        ({0: (1, 0.2, True), 1: (1, 0.9, False)}, 1),
        ({0: (1, 0.2, True), 1: (-9, None, False)}, 1),
        ({0: (-15, None, False), 1: (1, 0.9, True)}, 1),
        ({0: (-6, None, False), 1: (-11, None, False)}, 1),
        ({0: (1, 0.9, True), 1: (-15, 0.2, False)}, 1),
        ({0: (3, None, False), 1: (-15, None, False)}, 0),
    ],
)
def test_order_of_failures(tmp_path: Path, failures: dict[int, tuple[int, float | None, bool]], first: int) -> None:
    now = int(time.time())
    made = {
        rank: failure(tmp_path, rank, code, None if at is None else now + at, lost)
        for rank, (code, at, lost) in failures.items()
    }
    summary = FirstFailure("script", made)
    assert summary.get_first_failure()[0] == first
    assert f"rank      : {first}" in str(summary).partition("Root Cause")[2]
