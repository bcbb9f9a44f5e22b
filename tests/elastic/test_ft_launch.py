"""`bagua run --fault-tolerant`: ranks and launchers are killed and stopped, the others go on in the same processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.launchers import DEAF_S, Hosts, Launched, wait_for
from tests.fork_server import ForkServer
from tests.launch.launching import RUN, launch, script
from tests.pids import runs, state

pytestmark = pytest.mark.process

# A host that is told to end waits three times as long for hosts that it does not take for lost: longer than a test.
PATIENT = "--detect-s", "60"


@pytest.fixture
def hosts(fork_server: ForkServer, tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(fork_server, tmp_path, 3, "--nnodes", "3", "--detect-s", DEAF_S)
    yield made
    made.close()


def names(those: list[Launched]) -> list[str]:
    found = [each.seen() for each in those]
    return [each.name for each in found if each is not None]


def pids(those: list[Launched]) -> list[list[int]]:
    return [each.ranks() for each in those]


def test_a_killed_rank_and_then_a_host(hosts: Hosts) -> None:
    """The first is not started again, and its host leaves in order; one of two hosts that are left may end, too."""
    first, second, third = all_three = hosts.start_all()
    seen = [each.seen() for each in all_three]
    port = str(hosts.ports[0])
    assert [s.environment for s in seen if s] == [[str(i), "3", "127.0.0.1", port, "0"] for i in range(3)]
    called = names(all_three)
    survivors = [first, third]
    before = pids(survivors)
    os.kill(second.ranks()[0], signal.SIGKILL)
    hosts.await_members([called[0], called[2]], survivors)
    hosts.await_step(6, survivors)
    assert second.wait() == 128 + signal.SIGKILL
    assert "the rank of this host has been killed by SIGKILL; this host leaves the job" in second.text()
    assert "Signal 9 (SIGKILL) received by PID" in second.text()
    assert f"epoch 2: 2 hosts train from step 3; lost {called[1]}" in first.text()
    assert pids(survivors) == before
    hosts.stop(survivors)
    assert [each.wait() for each in survivors] == [0, 0]


def test_the_launcher_that_served_the_store_is_killed_and_comes_back(hosts: Hosts) -> None:
    """The others go on with the store of the next host. It does not found a second job, but joins as a newcomer."""
    first, *others = hosts.start_all()
    called, before = names(hosts.all), pids(others)
    first.kill()
    hosts.await_members(called[1:], others)
    hosts.await_step(6, others)
    view = others[0].seen()
    assert view is not None and view.view is not None
    assert view.view["store"].endswith(f":{hosts.ports[1]}") and view.view["step"] == 3
    group = view.view["group"]
    again = hosts.start()
    wait_for(lambda: again.seen() is not None, "rank of the newcomer", hosts)
    learner, other = again.seen(), others[0].seen()
    assert learner is not None and learner.view is not None and learner.name not in called
    assert learner.view["rank"] is None and learner.members == called[1:]  # without history it does not lead
    # Its default group is its own: in another it would wait for ranks that trained long ago.
    assert learner.environment == ["0", "1", "127.0.0.1", str(hosts.ports[0]), "0"]
    assert other is not None and other.view is not None and other.view["group"] == group
    assert pids(others) == before
    hosts.stop(others)
    assert [each.wait() for each in others] == [0, 0]
    assert again.wait() == 0 and "no rank is left that has the weights: the job ends" in again.text()


def test_a_rank_that_fails_comes_back_as_a_learner(hosts: Hosts) -> None:
    all_three = hosts.start_all("--max-restarts", "1")
    called = names(all_three)
    (old,) = all_three[0].ranks()
    hosts.stop(all_three[:1], code=3)
    hosts.await_members(called[1:], all_three[1:])
    (all_three[0].folder / "stop").unlink()
    wait_for(lambda: all_three[0].ranks() not in ([], [old]), "second rank", hosts)
    again = all_three[0].seen()
    assert again is not None and again.view is not None and again.view["rank"] is None and again.name == called[0]
    assert "has ended with exit code 3; it is started again once it has a place" in all_three[0].text()
    os.kill(again.pid, signal.SIGKILL)
    assert all_three[0].wait() == 128 + signal.SIGKILL
    hosts.stop(all_three[1:])
    assert [each.wait() for each in all_three[1:]] == [0, 0]


def test_a_launcher_that_is_told_to_end_leaves_in_order(hosts: Hosts) -> None:
    all_three = hosts.start_all()
    called = names(all_three)
    os.kill(all_three[2].pid, signal.SIGTERM)
    assert all_three[2].wait() == 128 + signal.SIGTERM
    assert "ended by SIGTERM; all ranks of this node have ended" in all_three[2].text()
    hosts.await_members(called[:2], all_three[:2])
    for each in all_three[:2]:
        os.kill(each.pid, signal.SIGINT)
    assert [each.wait() for each in all_three[:2]] == [128 + signal.SIGINT] * 2


def test_hosts_leave_when_nobody_has_the_weights(hosts: Hosts) -> None:
    """No epoch can be made without one that has them, so nobody is ever left out: each hears that the others end."""
    all_three = hosts.start_all("--max-restarts", "1", *PATIENT)
    first = all_three[0]
    (old,) = first.ranks()
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: first.ranks() not in ([], [old]), "rank without weights", hosts)
    hosts.await_members(names(all_three)[1:], all_three[1:])
    for each in all_three:
        os.kill(each.pid, signal.SIGINT)
    assert [each.wait() for each in all_three] == [128 + signal.SIGINT] * 3


def test_a_host_that_is_told_to_end_does_not_wait_for_one_that_is_gone(hosts: Hosts) -> None:
    first, second, third = hosts.start_all(*PATIENT)
    for each in (second, third):
        os.kill(each.pid, signal.SIGSTOP)
    os.kill(first.pid, signal.SIGTERM)
    wait_for(lambda: not first.ranks(), "end of the rank", hosts)
    for each in (second, third):
        each.kill()
    assert first.wait() == 128 + signal.SIGTERM


STUBBORN = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]) / "told").touch())
"""


def test_a_second_signal_does_not_wait(hosts: Hosts) -> None:
    """The rank does not end by itself."""
    hosts.script.write_text(STUBBORN + hosts.script.read_text())
    host = hosts.start("--nnodes", "1")
    hosts.await_step(3, [host])
    os.kill(host.pid, signal.SIGTERM)
    wait_for(lambda: (host.folder / "told").exists(), "signal for the rank", hosts)
    os.kill(host.pid, signal.SIGTERM)
    assert host.wait() == 128 + signal.SIGTERM


def test_a_launcher_tells_why_its_ranks_are_lost(fork_server: ForkServer, tmp_path: Path) -> None:
    """They end one by one, so epochs are decided meanwhile. One that is stopped does not react, and is killed."""
    hosts = Hosts(fork_server, tmp_path, 1, "--nnodes", "1", "--nproc-per-node", "3", "--detect-s", "3")
    try:
        (host,) = hosts.start_all("--max-restarts", "2")
        wait_for(lambda: len(host.all_seen()) == 3, "ranks", hosts)
        stopped = host.all_seen()[1].pid
        os.kill(stopped, signal.SIGSTOP)
        wait_for(lambda: state(stopped) == "T", "stop", hosts)
        os.kill(host.pid, signal.SIGTERM)
        assert host.wait() == 128 + signal.SIGTERM
        told = host.text().partition("received SIGTERM; it is passed on to the ranks, which are killed after 30 s")
        assert told[1] and "lost" not in told[0] and "it is started again" not in told[2]
        assert "epoch 2: 1 host trains" in told[2] and "has been stopped for 3" in told[2]
    finally:
        hosts.close()


DEAF = """
import os, pathlib, sys, time
(pathlib.Path(sys.argv[1]) / f"{os.getpid()}.json").touch()
while True: time.sleep(1)
"""


def test_a_rank_that_asks_nothing_ends_with_its_launcher(hosts: Hosts) -> None:
    hosts.script.write_text(DEAF)
    host = hosts.start("--nnodes", "1")
    wait_for(lambda: host.ranks() != [], "rank", hosts)
    host.kill()


def test_a_launcher_whose_rank_has_ended_waits_for_the_others(hosts: Hosts) -> None:
    """They do not notice, until it is told to end: then they train on without it."""
    all_three = hosts.start_all()
    called = names(all_three)
    hosts.stop(all_three[:1])
    wait_for(lambda: not all_three[0].ranks(), "end of the rank")
    hosts.await_step(6, all_three[1:])
    view = all_three[1].seen()
    assert runs(all_three[0].pid) and view is not None and view.view is not None and view.view["epoch"] == 1
    os.kill(all_three[0].pid, signal.SIGTERM)
    assert all_three[0].wait() == 128 + signal.SIGTERM
    hosts.await_members(called[1:], all_three[1:])
    hosts.await_step(9, all_three[1:])
    hosts.stop(all_three[1:])
    assert [each.wait() for each in all_three[1:]] == [0, 0]


def test_all_ranks_fail(hosts: Hosts) -> None:
    """A fault of the script: nobody has the weights, so the job ends, with restarts left or without."""
    all_three = hosts.start_all("--max-restarts", "1")
    hosts.stop(all_three, code=5)
    assert [each.wait() for each in all_three] == [5, 5, 5]
    assert any("no rank is left that has the weights: the job ends" in each.text() for each in all_three)


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (3, 3)], ids=["killed", "failed"])
def test_a_rank_that_is_not_back_when_the_others_end(hosts: Hosts, code: int | None, expected: int) -> None:
    """They have trained to the end, so a rank that was killed is not missed. One that fails by itself is reported."""
    first, *others = hosts.start_all("--max-restarts", "2")
    called = names(hosts.all)
    (old,) = first.ranks()
    if code is None:
        os.kill(old, signal.SIGKILL)
    else:
        hosts.stop([first], code)
    hosts.await_members(called[1:], others)
    (first.folder / "stop").unlink(missing_ok=True)
    hosts.await_step(6, others)
    wait_for(lambda: first.ranks() not in ([], [old]), "newcomer", hosts)
    hosts.stop(others)
    assert [each.wait() for each in hosts.all] == [expected, 0, 0]
    assert "the job ends; others have trained to the end" in first.text()


def test_a_stopped_rank_is_killed(fork_server: ForkServer, tmp_path: Path) -> None:
    """Its launcher sees that it is stopped, where the others could only guess."""
    hosts = Hosts(fork_server, tmp_path, 3, "--nnodes", "3", "--detect-s", "3")
    try:
        all_three = hosts.start_all()
        called = names(all_three)
        os.kill(all_three[1].ranks()[0], signal.SIGSTOP)
        assert all_three[1].wait() == 128 + signal.SIGKILL
        assert "has been stopped for 3" in all_three[1].text() and "it is killed" in all_three[1].text()
        hosts.await_members([called[0], called[2]], [all_three[0], all_three[2]])
        hosts.stop([all_three[0], all_three[2]])
        assert [all_three[0].wait(), all_three[2].wait()] == [0, 0]
    finally:
        hosts.close()


def test_ranks_of_a_host_are_lost_alone_and_together(hosts: Hosts) -> None:
    """Six ranks on three hosts: one is killed and comes back, then a host, which comes back; one is killed for good."""
    first, second, third = all_three = hosts.start_all("--nproc-per-node", "2", "--max-restarts", "1")
    wait_for(lambda: all(len(each.ranks()) == 2 for each in all_three), "ranks", hosts)
    hosts.await_step(3, all_three)
    seen = [each for host in all_three for each in host.all_seen()]
    port = str(hosts.ports[0])
    assert [s.environment for s in seen] == [[str(i), "6", "127.0.0.1", port, str(i % 2)] for i in range(6)]
    a, b, c = names(all_three)
    everybody = [f"{host}/{local}" for host in (a, b, c) for local in (0, 1)]
    assert seen[3].members == everybody and seen[3].view is not None and seen[3].view["rank"] == 3

    for each in all_three:
        (each.folder / "fetches").touch()
    os.kill(seen[3].pid, signal.SIGKILL)
    wait_for(lambda: len(second.ranks()) == 2 and seen[3].pid not in second.ranks(), "rank started again", hosts)
    hosts.await_members(everybody, all_three)
    hosts.await_step(6, all_three)
    wait_for(lambda: len(second.all_seen()) == 2, "ranks of the second host", hosts)
    again = second.all_seen()
    assert [s.pid for s in (*first.all_seen(), again[0], *third.all_seen())] == [
        s.pid for s in seen if s.pid != seen[3].pid
    ], "the others are the same processes"
    assert again[1].environment == ["0", "1", "127.0.0.1", str(hosts.ports[1]), "1"]
    assert f"3 hosts train with 5 ranks from step 3; lost {b}/1" in first.text()
    assert f"3 hosts train with 6 ranks from step 3; joined {b}/1" in first.text()

    third.kill()
    hosts.await_members(everybody[:4], [first, second])
    assert f"2 hosts train with 4 ranks from step 6; lost {c}/0, {c}/1" in first.text(), "in one change"
    hosts.await_step(9, [first, second])
    third = hosts.start("--nproc-per-node", "2")
    (third.folder / "fetches").touch()
    wait_for(lambda: len(third.ranks()) == 2, "ranks of the newcomer", hosts)
    d = names([third])[0]
    hosts.await_members([*everybody[:4], f"{d}/0", f"{d}/1"], [first, second, third])
    assert f"3 hosts train with 6 ranks from step 9; joined {d}/0, {d}/1" in first.text(), "in one change"

    os.kill(second.all_seen()[1].pid, signal.SIGKILL)
    hosts.await_members([*everybody[:3], f"{d}/0", f"{d}/1"], [first, second, third])
    hosts.await_step(12, [first, second, third])
    assert "rank 1 of this host has been killed by SIGKILL; the others of this host go on" in second.text()
    hosts.stop([first, second, third])
    assert [each.wait() for each in (first, second, third)] == [0, 128 + signal.SIGKILL, 0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--nproc-per-node", "33"), "--nproc-per-node 33: 1 to 32 with --fault-tolerant, not 33"),
        (("--nnodes", "2"), "--fault-tolerant needs --rdzv-endpoint HOST:PORT,HOST:PORT,... with the hosts of the job"),
        (("--nnodes", "3:2"), "--nnodes 3:2: expected N, or MIN:MAX with 0 < MIN <= MAX"),
        (("--rdzv-endpoint", "a"), "--rdzv-endpoint: 'a' is not HOST:PORT"),
        (("--detect-s", "0"), "--detect-s: detect_s=0.0: it must be positive and finite"),
        (("--max-wait-s", "1"), "--max-wait-s: max_wait_s=1.0: it must be more than detect_s=2.0"),
        (("--tee", "3"), "--tee cannot be used with --fault-tolerant yet"),
        (("--rdzv-conf", "join_timeout=soon"), "--rdzv-conf join_timeout=soon: expected a number of seconds"),
        (("--rdzv-backend", "etcd"), "--rdzv-backend etcd: --fault-tolerant has a rendezvous of its own"),
        (("--max-restarts", "-1"), "--max-restarts -1: must not be negative"),
    ],
)
def test_wrong_arguments_are_one_line(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from bagua.distributed.run import main

    assert main(["--fault-tolerant", *flags, "a.py"]) == 2
    assert capsys.readouterr().err == f"bagua run: {message}\n"


def test_a_job_of_one_host(tmp_path: Path) -> None:
    """In a process of its own, to its very end. A traceback goes into the summary."""
    path = script(tmp_path, "import bagua, sys\nbagua.init_process_group()\nprint('here', sys.argv[1:])\n1 / 0\n")
    outer = tmp_path / "outer.json"  # as if a launcher had started this one
    env = {"TORCHELASTIC_ERROR_FILE": str(outer)}
    ended = launch(tmp_path, *RUN, "--fault-tolerant", path, "local=${local_rank}", env=env)
    assert ended.code == 1 and "here ['local=0']" in ended.out
    assert "ZeroDivisionError: division by zero" in ended.err and "ZeroDivisionError" in outer.read_text()
    assert not list(tmp_path.glob("bagua-run-*"))
