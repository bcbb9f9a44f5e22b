"""One rank of a host is killed; its launcher and the other ranks are not."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack

import pytest

from bagua.lab import Cluster, LabError
from tests.lines import read_line

RUN = {"rank 0 runs\n", "rank 1 runs\n"}
RANKS = """
for rank in 0 1; do
    LOCAL_RANK=$rank sh -c 'echo rank $LOCAL_RANK runs; while sleep 0.1; do :; done' &
    eval "pid$rank=$!"
done
wait $pid1; echo rank 1: $?
wait $pid0; echo rank 0: $?
"""


@pytest.mark.parametrize("mode", ["namespaces", "pacing"])
def test_one_rank_is_killed(mode: str, request: pytest.FixtureRequest) -> None:
    if mode == "namespaces":
        request.getfixturevalue("namespaces")
    with Cluster(2, mode=mode) as cluster:
        first, second = cluster.hosts
        with ExitStack() as kept:
            started = [
                kept.enter_context(host.popen(["sh", "-c", RANKS], stdout=subprocess.PIPE, text=True))
                for host in (first, second)
            ]
            kept.callback(lambda: [each.kill() for each in started])  # else a failure waits for them for ever
            (one, other) = (each.stdout for each in started)
            for each in (one, other):
                assert {read_line(each, "rank that runs"), read_line(each, "second rank that runs")} == RUN
            first.kill_rank(1)
            assert read_line(one, "end of rank 1") == "rank 1: 137\n"
            with pytest.raises(LabError, match="no process has LOCAL_RANK=1"):
                first.kill_rank(1)
            first.kill_rank(0)
            assert read_line(one, "end of rank 0") == "rank 0: 137\n"
            second.kill_rank(1)  # it has been left alone until now
            assert read_line(other, "end of rank 1 of the other host") == "rank 1: 137\n"
            second.kill_rank(0)


@pytest.mark.parametrize("mode", ["namespaces", "pacing"])
def test_a_rank_that_starts_processes_all_the_time_leaves_none(mode: str, request: pytest.FixtureRequest) -> None:
    """A process that began between the look and the kill would go on without its parent."""
    if mode == "namespaces":
        request.getfixturevalue("namespaces")
    code = "echo runs; while :; do sleep 1000 & kill $!; done"
    with Cluster(2, mode=mode) as cluster:
        host = cluster.hosts[0]
        for _ in range(5):
            with ExitStack() as kept:
                words = ["env", "LOCAL_RANK=1", "sh", "-c", code]
                rank = kept.enter_context(
                    host.popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                )
                kept.callback(rank.kill)
                assert read_line(rank.stdout, "rank that runs") == "runs\n"
                host.kill_rank(1)
                with pytest.raises(LabError, match="no process has LOCAL_RANK=1"):
                    host.kill_rank(1)


@pytest.mark.parametrize("mode", ["namespaces", "pacing"])
def test_a_forked_rank_is_found_by_its_name(mode: str, request: pytest.FixtureRequest) -> None:
    if mode == "namespaces":
        request.getfixturevalue("namespaces")
    code = "printf bagua-rank-1 > /proc/$$/comm; echo runs; while :; do sleep 1; done"
    with Cluster(2, mode=mode) as cluster, ExitStack() as kept:
        host = cluster.hosts[0]
        rank = kept.enter_context(host.popen(["sh", "-c", code], stdout=subprocess.PIPE, text=True))
        kept.callback(rank.kill)
        assert read_line(rank.stdout, "rank that runs") == "runs\n"
        with pytest.raises(LabError, match="no process has LOCAL_RANK=0"):
            host.kill_rank(0)
        host.kill_rank(1)
        assert rank.wait(10) == -9
