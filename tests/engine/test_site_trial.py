"""Over sites a trial at the start decides whether their hosts sum first, unless the user has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua.algorithms import ByteGrad, Warmup
from bagua.algorithms.base import Algorithm
from bagua.algorithms.registry import get
from bagua.codecs import Int4
from bagua.comm.node_keys import Sites
from bagua.comm.team import Team
from bagua.engine.reducer.bucket import Bucket
from bagua.engine.tuning import site_trial
from bagua.engine.tuning.site_trial import Trial, flat_of, run_trial, tries
from bagua.exchanges import Exchange, Hierarchical, ScatterGather
from tests.rank_threads import run_teams, teams

HOSTS = ["a:0", "a:1", "b:2", "b:3"]
SITES = Sites([(0, 1), (2, 3)])


def flat(algorithm: str | Algorithm, nodes: Any = SITES, **options: Any) -> Any:
    given = get(algorithm, **options)
    return flat_of(given, given.for_nodes(nodes)[0], nodes)


@pytest.mark.parametrize("algorithm", ["bytegrad", "qadam", "zero_one_adam", "one_bit_lamb"])
def test_what_compresses_gradients_is_open(algorithm: str) -> None:
    assert flat(algorithm) == get(algorithm, hierarchical=False)


def test_a_codec_of_few_bits_is_open() -> None:
    eden = {"codec": "eden", "hierarchical": False}
    assert flat("gradient_allreduce", codec="eden") == get("gradient_allreduce", **eden)


@pytest.mark.parametrize("choice", [True, False])
def test_what_the_user_has_decided_is_not(choice: bool) -> None:
    assert flat("bytegrad", hierarchical=choice) is None


@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", "power_sgd", "low_precision_decentralized", "local_sgd", "diloco", "async"]
)
def test_nor_is_what_always_gains_or_is_not_an_exchange_of_gradients(algorithm: str) -> None:
    assert flat(algorithm) is None


@pytest.mark.parametrize(
    "algorithm",
    [
        get("gradient_allreduce", codec="bf16"),  # summed as it is
        get("async", warmup_steps=3),  # later it exchanges weights
        get("low_precision_decentralized"),
    ],
)
def test_nor_are_sums_in_16_bits_and_what_exchanges_weights_later(algorithm: Algorithm) -> None:
    assert flat(algorithm) is None


def test_nor_is_an_exchange_that_is_hierarchical_whatever_the_option_says() -> None:
    @dataclass(frozen=True)
    class Always(ByteGrad):
        @property
        def exchange(self) -> Exchange:  # pyright: ignore[reportIncompatibleVariableOverride]
            return Hierarchical(ScatterGather(Int4()))

    assert flat_of(Always(), Always(hierarchical=True), SITES) is None


def test_nor_is_it_between_nodes() -> None:
    assert flat("bytegrad", nodes=((0, 1), (2, 3))) is None


def test_a_trial_takes_place_between_sites_of_several_hosts() -> None:
    def asked(hosts: list[str]) -> bool:
        members = teams(4, hosts)
        for team in members:
            team.discover_sites([each.node for each in members])
        return tries(members[0], SITES, torch.device("cpu"))

    assert asked(HOSTS) and not asked(["a:0", "a:0", "b:1", "b:1"])
    assert not tries(Team.alone(), SITES, torch.device("cuda"))


def test_of_a_warm_up_the_part_that_compresses() -> None:
    found = flat(Warmup(3, then="bytegrad"))
    first, then = found.parts
    assert found.steps == 3 and first.hierarchical is True and then == get("bytegrad", hierarchical=False)
    assert flat(Warmup(3, then="gradient_allreduce")) is None


class Clock:
    """Each exchange takes the next of its times."""

    def __init__(self, sites_s: Sequence[float], flat_s: Sequence[float]) -> None:
        self.left_s = {True: iter(sites_s), False: iter(flat_s)}
        self.sizes: list[list[int]] = []
        self.sums: list[float] = []

    def time_s(self, exchange: Exchange, payloads: Mapping[int, Tensor]) -> float:
        self.sizes.append([each.numel() for each in payloads.values()])
        self.sums.append(sum(float(each.sum()) for each in payloads.values()))
        for each in payloads.values():
            each.mul_(100)
        return next(self.left_s[exchange.hierarchical])


def buckets(*sizes: int) -> list[Bucket]:
    params = [[nn.Parameter(torch.zeros(size, dtype=torch.float32, device="cpu"))] for size in sizes]
    kind = get("bytegrad").payload
    return [Bucket(index, [f"p{index}"], each, kind) for index, each in enumerate(params)]


def tried(clock: Clock, team: Team, *sizes: int, algorithm: str | Algorithm = "bytegrad") -> Trial:
    given = get(algorithm)
    return run_trial(clock, team, buckets(*sizes), given.for_nodes(SITES)[0], flat(given))


def test_the_first_round_does_not_count_and_medians_do() -> None:
    clock = Clock([9, 2, 1, 3], [0.1, 5, 4, 6])
    found = tried(clock, Team.alone(), 1000)
    assert (found.sites_s, found.flat_s, found.nbytes, found.name) == (2, 5, 4000, "bytegrad")
    assert not found.flat_wins and "the ranks of a site sum first: 2000 ms" in found.told
    assert "hierarchical=True to bytegrad" in found.told
    assert len(set(clock.sums)) == 1, "every exchange gets the same numbers"


def test_the_slowest_rank_of_each_round_counts() -> None:
    def slow_in_turns(team: Team) -> Trial:
        return tried(Clock([1.0, 5.0 - team.rank, 1.0 + team.rank, 1.0], [2.0] * 4), team, 10)

    found = run_teams(4, slow_in_turns)
    assert len(set(found)) == 1 and found[0].sites_s == 4.0 and found[0].flat_s == 2.0 and found[0].flat_wins


def test_the_faster_one_is_chosen() -> None:
    assert not Trial(1.0, 1.0, 4, "").flat_wins
    assert Trial(1.1, 1.0, 4, "").flat_wins and "hierarchical=False" in Trial(1.1, 1.0, 4, "").told


@pytest.mark.parametrize(
    ("algorithm", "sizes", "expected"),
    [
        # 4 ranks send 1.5 bytes of an element in 8 bits: 8 KiB are 5400 elements
        ("bytegrad", (3000, 2000, 3000), [3000, 2000, 400]),
        ("bytegrad", (7000, 10), [5400]),
        ("bytegrad", (10, 20), [10, 20]),
        (get("bytegrad", codec="eden"), (9000, 9000), [9000, 7384]),  # 64 KiB of payload
    ],
)
def test_the_payloads_are_the_first_elements(
    algorithm: str | Algorithm, sizes: tuple[int, ...], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_trial, "MOST_WIRE_BYTES", site_trial.MOST_WIRE_BYTES // 1024)
    monkeypatch.setattr(site_trial, "MOST_BYTES", site_trial.MOST_BYTES // 1024)

    def rank_main(team: Team) -> list[list[int]]:
        clock = Clock([1.0] * 4, [1.0] * 4)
        found = tried(clock, team, *sizes, algorithm=algorithm)
        assert found.nbytes == 4 * sum(clock.sizes[0])
        return clock.sizes

    for found in run_teams(4, rank_main):
        assert found[0] == pytest.approx(expected, rel=0.02, abs=150) and found == found[:1] * 8


def test_of_a_warm_up_what_runs_in_the_end_is_tried() -> None:
    found = tried(Clock([1] * 4, [2] * 4), Team.alone(), 10, algorithm=Warmup(2, then="bytegrad"))
    assert (found.sites_s, found.flat_s, found.name) == (1, 2, "bytegrad")


def test_all_parts_that_a_choice_changes_are_named() -> None:
    found = tried(Clock([1] * 4, [2] * 4), Team.alone(), 10, algorithm=Warmup(2, "bytegrad", "qadam"))
    assert "hierarchical=True to bytegrad and qadam" in found.told


def test_empty_buckets_are_left_out() -> None:
    clock = Clock([1] * 4, [2] * 4)
    assert tried(clock, Team.alone(), 0, 10, 0, 20).nbytes == 120 and clock.sizes[0] == [10, 20]
    assert not tried(Clock([], []), Team.alone(), 0).flat_wins


def test_other_defaults_of_torch_do_not_matter() -> None:
    with torch.device("meta"):
        assert tried(Clock([1] * 4, [2] * 4), Team.alone(), 10).nbytes == 40
