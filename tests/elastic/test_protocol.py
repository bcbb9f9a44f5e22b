"""The membership protocol under seeded faults: see protocol_simulation/ for what is simulated and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import pytest

from bagua.membership import Epoch, Member, Options, Record, Verdict, progress, proposer, seats
from bagua.membership.composition import Reported, compose
from bagua.membership.epoch import NO_MODEL
from tests.elastic.protocol_simulation import Cluster, Violation, simulate

EVERYDAY, CHUNK = 40, 20
ALL, SLOW_CHUNK = 10_200, 200


@pytest.mark.parametrize("first", range(0, EVERYDAY, CHUNK))
def test_invariants_hold_under_faults(first: int) -> None:
    for seed in range(first, first + CHUNK):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(EVERYDAY, ALL, SLOW_CHUNK))
def test_invariants_hold_under_faults_many_seeds(first: int) -> None:
    for seed in range(first, first + SLOW_CHUNK):
        simulate(seed)


def test_the_seeds_reach_what_matters() -> None:
    """Epochs that follow a loss, an arrival, an excluded host that comes back, a step that some had completed."""
    seen = {"loss": 0, "arrival": 0, "catch-up": 0, "recovered": 0, "leave": 0, "same group": 0}
    seen |= {"one rank lost": 0, "one rank comes": 0, "several ranks come": 0}
    for seed in range(60):
        if min(seen.values()):
            break
        epochs = simulate(seed).decided
        for number in sorted(epochs.keys() & {n + 1 for n in epochs}):
            before, after = epochs[number - 1], epochs[number]
            names = {m.name for m in before.members}
            seen["loss"] += bool(names - {m.name for m in after.members})
            seen["arrival"] += any(m.name not in names for m in after.members)
            seen["catch-up"] += any(m.votes and m.held < after.step for m in after.members)
            seen["recovered"] += any(m.incarnation > 0 for m in after.members)
            seen["leave"] += "leaves" in after.reason
            seen["same group"] += before.group == after.group
            for member in after.trainers:
                had = before.by_name[member.name].seats if member.name in names else ()
                seen["one rank lost"] += bool(set(had) - set(member.seats))
                seen["one rank comes"] += bool(had and set(member.seats) - set(had))
                seen["several ranks come"] += not had and len(member.seats) > 1
    assert min(seen.values()) > 0, seen


def test_nothing_changes_without_faults() -> None:
    cluster = simulate(0, faults=False)
    assert list(cluster.decided) == [1]
    held = {host.agent.held for host in cluster.hosts if host.agent is not None}
    assert min(held) > 20 and max(held) - min(held) <= 1


def test_a_seed_repeats_its_run() -> None:
    first, second = simulate(7), simulate(7)
    assert list(first.trace) == list(second.trace) and first.count == second.count


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", [0, 2])
def test_a_slow_host_is_named_and_waited_for(place: int, ranks: int) -> None:
    """Whether its steps, or what each round of several local steps takes, are longer than `detect_s`, 1 s, or not.

    One slow rank makes its host slow: the others of the host have arrived, and wait as those of other hosts do.
    """
    for seed, seconds in ((0, 0.9), (1, 5.0)):
        compute_s = [seconds if at == place else 0.1 for at in range(4)]
        cluster = Cluster(seed, faults=False, compute_s=compute_s, ranks=ranks)
        cluster.network.run(60.0)
        assert list(cluster.decided) == [1]
        assert {name for _, name, _ in cluster.slow} == {f"h{place}.0"}
        assert {by for _, _, by in cluster.slow} == {f"h{at}.0" for at in range(4) if at != place}
        assert all(host.agent is None or host.agent.held > 5 for host in cluster.hosts[:4])


def test_a_host_that_is_too_slow_is_given_up_and_comes_back_when_it_is_not() -> None:
    options = Options(detect_s=1.0, max_wait_s=4.0)
    cluster = Cluster(3, faults=False, compute_s=[0.1, 30.0, 0.1], ranks=2, options=options)
    cluster.network.run(20.0)
    assert {name for _, name, _ in cluster.slow} == {"h1.0"}
    assert "h1.0 is lost: waited for it for" in cluster.decided[2].reason
    assert [member.name for member in cluster.decided[2].trainers] == ["h0.0", "h2.0"]
    # It asks to join again, and if it is as slow then, is given up again.
    cluster.hosts[1].compute_s = 0.1
    cluster.settle()


def test_hosts_of_one_speed_make_nobody_slow() -> None:
    for seconds in (0.1, 0.6, 3.0):
        options = Options(detect_s=1.0, max_wait_s=2.0)
        cluster = Cluster(5, faults=False, compute_s=[seconds] * 4, ranks=2, options=options)
        cluster.network.run(60.0)
        assert list(cluster.decided) == [1] and not cluster.slow


# What the simulation finds if a rule of the protocol is broken.


def _one_vote(epoch: Epoch, names: Iterable[str]) -> bool:
    return any(name in names for name in epoch.voters)


def _half(epoch: Epoch, names: Iterable[str]) -> bool:
    return 2 * sum(name in names for name in epoch.voters) >= len(epoch.voters)


def _least_step(epoch: Epoch, promises: Mapping[str, Reported], joins: Iterable[Member], reason: str) -> Epoch | None:
    value = compose(epoch, promises, joins, reason)
    step = min((m.held for m in value.trainers), default=0) if value else 0
    return value and replace(value, step=step, group_step=step if value.group == value.number else value.group_step)


class _NotFenced(progress.Progress):
    """Completes steps after it has reported."""

    @property
    def fenced(self) -> bool:
        return False

    @fenced.setter
    def fenced(self, value: bool) -> None:
        pass


class _FreshLeads(progress.Progress):
    """Takes its own initial weights for those of the job."""

    _steps = NO_MODEL

    @property
    def held(self) -> int:
        return max(self._steps, 0)

    @held.setter
    def held(self, value: int) -> None:
        self._steps = value


class _TakesAnyWeights(progress.Progress):
    """Does not ask whether the steps of fetched weights still count."""

    def fetch(self, epoch: int, step: int, ask: bool = False) -> Verdict:
        verdict = super().fetch(epoch, step, ask)
        if verdict is Verdict.DENIED and (self.behind or self.held == NO_MODEL):
            self.held, verdict = self.held if ask else step, Verdict.GRANTED
        return verdict


_recover = Record.recover


def _forgets(data: bytes) -> Record:
    return replace(_recover(data), promised=None, accepted_ballot=None, accepted=None)


def _patched(where: object, name: str, value: object) -> Callable[[], AbstractContextManager[object]]:
    return lambda: patch.object(where, name, value)


@pytest.mark.parametrize(
    ("broken", "finds"),
    [
        pytest.param(_patched(proposer, "is_quorum", _one_vote), "two epochs", id="one vote is a quorum"),
        pytest.param(_patched(proposer, "is_quorum", _half), "two epochs", id="half of the votes are a quorum"),
        pytest.param(_patched(proposer, "value_to_adopt", lambda *_: None), "two epochs", id="accepted is not adopted"),
        pytest.param(_patched(proposer, "compose", _least_step), "do not fit", id="a completed step does not count"),
        pytest.param(_patched(seats, "Progress", _FreshLeads), "weights", id="a host without history leads"),
    ],
)
def test_a_broken_rule_is_found(broken: Callable[[], AbstractContextManager[object]], finds: str) -> None:
    with broken(), pytest.raises(Violation, match=f"(?s)seed [0-9]+: .*{finds}.*Replay: simulate"):
        for seed in range(200):
            simulate(seed, ambush=0.3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(_patched(Record, "recover", _forgets), id="a recovered voter forgets"),
        pytest.param(_patched(seats, "Progress", _NotFenced), id="steps are completed after the report"),
        pytest.param(_patched(seats, "Progress", _TakesAnyWeights), id="fetched weights are not checked"),
    ],
)
def test_a_broken_rule_is_found_within_many_seeds(broken: Callable[[], AbstractContextManager[object]]) -> None:
    """Rules that matter in rare interleavings only; test_membership.py has a test of its own for each."""
    with broken(), pytest.raises(Violation, match=r"seed [0-9]+: "):
        for seed in range(2000):
            simulate(seed, ambush=0.3)
