"""Tuning in training: all ranks change over together, and what they train stays what it was."""

from __future__ import annotations

import csv
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import bagua
from bagua.algorithms import GradientAllReduce
from bagua.autotune import Settings
from bagua.autotune.progress import Progress
from bagua.engine.engine import Engine
from bagua.engine.hooks import attachments
from tests.autotune.training import WIDTH, Training, make_model, pretend
from tests.rank_threads import run_teams

KIB, MIB = 2**10, 2**20
QUICK: dict[str, Any] = {"sampling_confidence_time_s": 0}
START = 256 * KIB  # bucket_bytes


def follow(team: Any, algorithm: Any, autotune: Any, steps: int, passes: int = 1, **options: Any) -> tuple[Tensor, Any]:
    training = Training(team, algorithm, autotune=autotune, bucket_bytes=START, **options).steps(steps, passes)
    return training.weights, bagua.stats(training.model)


def compare(
    algorithm: Any, size: int, nodes: Any = None, steps: int = 25, passes: int = 1, **how: Any
) -> list[Progress]:
    """Train with settings that change all the time, and without; returns what the ranks say of the former."""
    exact = how.pop("exact")
    tuned = run_teams(
        size, follow, algorithm, {**QUICK, "search": "random", "max_turns": 22, **how}, steps, passes, nodes=nodes
    )
    plain = run_teams(size, follow, algorithm, False, steps, passes, nodes=nodes)
    for (got, _), (wanted, _) in zip(tuned, plain, strict=True):
        if exact:
            assert torch.equal(got, wanted)
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    return [stats.tuning for _, stats in tuned]


@pytest.mark.parametrize("passes", [1, 2])
def test_two_ranks_train_the_same_bits(passes: int) -> None:
    """Of two numbers there is one order of summing."""
    for progress in compare("gradient_allreduce", 2, passes=passes, exact=True):
        assert progress.num_samples > 4
        assert progress.tuned == ("bucket_bytes", "part_bytes", "num_lanes")
        assert progress.phase == "done"


def test_sums_straight_between_ranks_are_in_the_order_of_ranks_wherever_they_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bagua.engine.tuning.search_space._sums_directly", lambda engine, hierarchy: False)
    for progress in compare("gradient_allreduce", 3, nodes=[0, 1, 2], exact=True):
        assert progress.num_samples > 4


@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", GradientAllReduce(average=False), "local_sgd", "decentralized"]
)
def test_sums_in_another_order_differ_by_rounding(algorithm: Any) -> None:
    options = {"communication_interval": 2} if algorithm == "local_sgd" else {}
    for progress in compare(bagua.algorithms.get(algorithm, **options), 3, nodes=[0, 1, 2], exact=False):
        assert progress.num_samples > (1 if algorithm == "local_sgd" else 4)
        assert progress.tuned == ("bucket_bytes", "direct_bytes", "part_bytes", "num_lanes")


def test_gossip_does_not_depend_on_cuts() -> None:
    algorithm = bagua.algorithms.get("decentralized", peer_selection_mode="shift_one")
    for progress in compare(algorithm, 2, exact=True):
        assert progress.tuned == ("bucket_bytes", "part_bytes", "num_lanes")


@pytest.mark.parametrize(
    "algorithm",
    [
        "bytegrad",
        GradientAllReduce(codec="sign", error_feedback=True),
        "low_precision_decentralized",
        bagua.algorithms.get("low_precision_decentralized", overlap=True),
        "power_sgd",
        bagua.algorithms.get("diloco", communication_interval=2, delay=1),
    ],
)
def test_where_cuts_matter_lanes_are_tuned_only_and_no_bit_changes(algorithm: Any) -> None:
    for progress in compare(algorithm, 3, nodes=[0, 1, 2], steps=20, max_turns=17, exact=True):
        assert progress.tuned == ("num_lanes",)
        assert progress.num_samples == 3, "there are four buckets"


def test_hierarchy_is_tuned_where_it_was_left_open() -> None:
    nodes = [0, 0, 1, 1]
    for progress in compare("gradient_allreduce", 4, nodes=nodes, exact=False):
        assert progress.tuned[0] == "hierarchical"
    for progress in compare(GradientAllReduce(hierarchical=True), 4, nodes=nodes, steps=3, exact=True):
        assert "hierarchical" not in progress.tuned
        assert progress.settings.hierarchical


# -- what is kept ------------------------------------------------------------------------------------------------


def small_buckets_are_fast(settings: Settings) -> float:
    return 0.1 + settings.bucket_bytes / MIB + settings.num_lanes / 100 + 0.01 * (settings.direct_bytes > 0)


def to_the_end(team: Any, **options: Any) -> tuple[Any, int, int, Tensor]:
    training = Training(team, autotune={**QUICK, **options}, bucket_bytes=START).until_tuned()
    met = team.counters.collectives
    training.steps(3)
    engine = engine_of(training)
    assert team.counters.collectives == met, "not a word any more"
    assert len(engine.pool.shared) == engine.dispatcher.num_busy_lanes
    return bagua.stats(training.model), training.made, met, training.weights


def engine_of(training: Training) -> Engine:
    return attachments[training.model].engine


def test_the_best_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, small_buckets_are_fast)
    results = run_teams(3, to_the_end, nodes=[0, 1, 2])
    for stats, made, _, _ in results:
        progress = stats.tuning
        assert progress.phase == "done"
        assert (progress.settings.bucket_bytes, progress.settings.num_lanes) == (64 * KIB, 1)
        assert progress.settings.direct_bytes == 0
        assert progress.best_step_s < progress.default_step_s
        assert progress.num_steps < 58
        assert made < 60 + 3
        assert stats.num_buckets == 16
        assert any("buckets of 0.0625 MiB" in notice for notice in stats.notices)
    assert len({torch.sum(weights).item() for *_, weights in results}) == 1


def test_the_defaults_stay_where_nothing_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda settings: 0.1)
    for stats, *_ in run_teams(2, to_the_end):
        assert stats.tuning.settings == Settings(START, 4, 16 * MIB, 2 * MIB, False)
        assert stats.num_buckets == 4


def scarce(team: Any) -> tuple[Progress, int]:
    training = Training(team, autotune=QUICK, bucket_bytes=START)
    engine = engine_of(training)
    check, adopt = engine.binding.check_settings, engine.binding.adopt_settings

    def checked(settings: Settings) -> None:
        if team.rank == 1 and settings.bucket_bytes < START // 2:
            raise RuntimeError("no memory")
        check(settings)

    def adopted(settings: Settings) -> None:
        adopt(settings)
        if team.rank == 0 and settings.num_lanes == 2:
            raise RuntimeError("no connection")

    engine.binding.check_settings, engine.binding.adopt_settings = checked, adopted  # type: ignore[method-assign]
    training.until_tuned().steps(2)
    return training.progress, len(engine.pool.shared)


def test_settings_that_one_rank_cannot_have_are_skipped_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, small_buckets_are_fast)
    for progress, num_lanes in run_teams(2, scarce):
        assert progress.settings.bucket_bytes == START // 2
        assert progress.settings.num_lanes == num_lanes == 1 or progress.settings.num_lanes >= 4
        assert any("rank 1: RuntimeError: no memory" in problem for problem in progress.problems)
        assert any("rank 0: RuntimeError: no connection" in problem for problem in progress.problems)


# -- files -------------------------------------------------------------------------------------------------------


def with_file(team: Any, path: str, steps: int, algorithm: str = "gradient_allreduce") -> tuple[Progress, int]:
    training = Training(team, algorithm, autotune=bagua.Autotune(**QUICK, max_turns=20, file=path), bucket_bytes=START)
    training.steps(steps)
    return training.progress, training.made


def test_a_result_is_saved_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, small_buckets_are_fast)
    path = str(tmp_path / "tuned.json")
    found = [progress for progress, _ in run_teams(2, with_file, path, 24)]
    assert all(progress.phase == "done" and not progress.reason for progress in found)
    assert len(json.loads(Path(path).read_text())["results"]) == 1
    for progress, _ in run_teams(2, with_file, path, 1):
        assert progress.settings == found[0].settings
        assert (progress.phase, progress.reason, progress.num_steps) == ("done", "from the file of results", 0)
    # Another algorithm, or other ranks, need results of their own.
    for progress, _ in run_teams(2, with_file, path, 2, "bytegrad"):
        assert progress.phase in ("warm-up", "search")
    for progress, _ in run_teams(3, with_file, path, 24):
        assert not progress.reason
    assert len(json.loads(Path(path).read_text())["results"]) == 2


def refused(team: Any, *arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:
        Training(team, autotune=arguments[team.rank], bucket_bytes=START).steps(2)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_spoilt_file_is_told_to_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("{")
    first, second = run_teams(2, refused, str(path), str(path))
    assert first.startswith("ValueError: autotune: file")
    assert second.startswith("RankMismatchError: rank 0 cannot distribute its module: ValueError: autotune: file")


def test_a_file_cannot_smuggle_in_what_changes_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda settings: settings.num_lanes / 10)
    path = tmp_path / "tuned.json"
    run_teams(2, with_file, str(path), 24, "bytegrad")
    content = json.loads(path.read_text())
    next(iter(content["results"].values()))["settings"]["bucket_bytes"] = 12345
    path.write_text(json.dumps(content))

    def load(team: Any) -> None:
        with pytest.raises(ValueError, match="file: bucket_bytes of 'bytegrad' cannot be set here"):
            Training(team, "bytegrad", autotune=str(path), bucket_bytes=START).steps(2)

    run_teams(2, load)


def test_ranks_must_want_the_same(tmp_path: Path) -> None:
    messages = run_teams(2, refused, True, {"max_samples": 5})
    assert all(message.startswith("RankMismatchError: autotune differs: rank 1 has Autotune(") for message in messages)
    assert all(
        message.startswith("RankMismatchError: autotune differs: rank 1 has None")
        for message in run_teams(2, refused, True, False)
    )
    first, second = run_teams(2, refused, True, {"max_turns": 2})
    assert "RankMismatchError: rank 1 cannot distribute" in first
    assert second.startswith("ValueError: autotune: max_turns")


def test_the_log(tmp_path: Path) -> None:
    path = tmp_path / "tune.csv"
    results = run_teams(2, to_the_end_logged, str(path))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert {row["phase"] for row in rows} >= {"warm-up", "search"}
    assert sum(int(row["num_steps"]) for row in rows) == results[0].num_steps
    assert all(float(row["score"]) > 0 for row in rows)
    assert [int(row["train_iter"]) for row in rows] == sorted(int(row["train_iter"]) for row in rows)


def to_the_end_logged(team: Any, path: str) -> Progress:
    return Training(team, autotune={**QUICK, "log": path}, bucket_bytes=START).until_tuned().progress


# -- states, hand-overs, and what cannot be tuned ------------------------------------------------------------------


def resumed(team: Any, steps: int, autotune_again: bool) -> tuple[Tensor, Tensor, Progress | None]:
    """Save after `steps`, go on; and load into a new model, and go on there."""
    first = Training(team, autotune={**QUICK, "max_turns": 20}, bucket_bytes=START).steps(steps)
    state, weights = bagua.state_dict(first.model), first.model.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    second = Training(team, autotune=QUICK if autotune_again else False, bucket_bytes=START)
    second.model.load_state_dict(weights)
    bagua.load_state_dict(second.model, state)
    second.made = first.made
    return first.steps(4).weights, second.steps(4).weights, bagua.stats(second.model).tuning


@pytest.mark.parametrize("autotune_again", [False, True])
def test_a_tuned_training_resumes_as_it_was(monkeypatch: pytest.MonkeyPatch, autotune_again: bool) -> None:
    pretend(monkeypatch, small_buckets_are_fast)
    for went_on, again, progress in run_teams(3, resumed, 24, autotune_again, nodes=[0, 1, 2]):
        assert torch.equal(went_on, again)
        assert progress is not None
        assert progress.settings.bucket_bytes < START
        assert progress.reason == "loaded with the state"


def moved(team: Any) -> list[tuple[Settings, str, tuple[str, ...]]]:
    """Load a tuned state where lanes have groups for a hierarchy, where they have none, and as of other ranks."""
    first = Training(team, autotune={**QUICK, "max_turns": 16}, bucket_bytes=START).until_tuned()
    state = bagua.state_dict(first.model)
    assert first.progress.settings.hierarchical
    found = []
    for autotune, size in ((True, 4), (False, 4), (True, 3)):
        state["tuned"]["size"] = size
        training = Training(team, autotune=autotune, bucket_bytes=START)
        bagua.load_state_dict(training.model, state)
        training.steps(1)
        stats = bagua.stats(training.model)
        found.append((engine_of(training).binding.settings, stats.tuning.phase if stats.tuning else "", stats.notices))
    return found


def test_a_tuned_state_is_used_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda settings: 0.1 if settings.hierarchical else 0.2)
    for fits, without_groups, other_size in run_teams(4, moved, nodes=[0, 0, 1, 1]):
        assert fits[0].hierarchical
        assert fits[1] == "done"
        assert not without_groups[0].hierarchical
        assert any("cannot be applied here: hierarchical" in notice for notice in without_groups[2])
        assert not other_size[0].hierarchical
        assert other_size[1] == "warm-up"


@pytest.mark.parametrize("autotune_again", [False, True])
def test_a_state_saved_in_the_middle_of_tuning_holds_no_trial(
    monkeypatch: pytest.MonkeyPatch, autotune_again: bool
) -> None:
    pretend(monkeypatch, small_buckets_are_fast)
    for went_on, again, progress in run_teams(2, resumed, 7, autotune_again):
        assert torch.equal(went_on, again), "two ranks, one order of summing"
        assert (progress is None) == (not autotune_again)


def handing_over(team: Any) -> tuple[list[str], Progress]:
    phases = []
    algorithm = bagua.algorithms.Warmup(5, "gradient_allreduce", "bytegrad")
    training = Training(team, algorithm, autotune=QUICK, bucket_bytes=START)
    for _ in range(8):
        training.steps(1)
        phases.append(training.progress.phase)
    return phases, training.until_tuned().progress


def test_what_runs_after_a_hand_over_is_tuned() -> None:
    for phases, progress in run_teams(2, handing_over):
        assert phases[:4] == ["waiting"] * 4
        assert "warm-up" in phases[4:]
        assert progress.tuned == ("num_lanes",)


def falling_back(team: Any) -> tuple[Progress, str, Settings]:
    guard = bagua.Guard(every=12, min_cosine=1.0)
    training = Training(team, "bytegrad", autotune=QUICK, guard=guard, bucket_bytes=START).steps(20)
    engine = engine_of(training)
    return training.progress, engine.algorithm.name, engine.binding.settings


def test_a_fallback_is_tuned_anew() -> None:
    for progress, name, _ in run_teams(2, falling_back):
        assert name == "gradient_allreduce"
        assert progress.tuned == ("bucket_bytes", "part_bytes", "num_lanes")


def off(team: Any, algorithm: str, optimizer: Any = None) -> tuple[Progress | None, tuple[str, ...]]:
    model = make_model()
    made = optimizer(model.parameters()) if optimizer else torch.optim.SGD(model.parameters(), lr=0.01)
    bagua.distribute(model, made, algorithm, process_group=team, autotune=True)
    for _ in range(3):
        made.zero_grad()
        model(torch.ones(2, WIDTH)).square().mean().backward()
        made.step()
    stats = bagua.stats(model)
    bagua.detach(model)
    return stats.tuning, stats.notices


@pytest.mark.parametrize(
    ("algorithm", "size", "optimizer", "reason"),
    [
        ("gradient_allreduce", 1, None, "there is only one rank"),
        ("async", 2, None, "no step waits for the exchanges of 'async'"),
        ("diloco", 2, None, "'diloco' exchanges only every 64 steps"),
        ("qadam", 2, bagua.optim.QAdam, "the steps of 'qadam' are not all alike"),
        ("bytegrad", 2, None, "no setting has an effect on this module"),
    ],
)
def test_where_nothing_can_be_tuned_that_is_said(algorithm: str, size: int, optimizer: Any, reason: str) -> None:
    for progress, notices in run_teams(size, off, algorithm, optimizer):
        assert (progress.phase, progress.reason) == ("off", reason)
        assert f"autotune: not tuning: {reason}" in notices


def test_a_simulation_is_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    simulation = bagua.simulate(
        "gradient_allreduce",
        ranks=2,
        model=lambda: torch.nn.Linear(4, 4),
        loss=lambda module, rank, step: module(torch.ones(1, 4)).sum(),
        steps=3,
    )
    for stats in simulation.stats:
        assert stats.tuning is not None
        assert (stats.tuning.phase, stats.tuning.reason) == ("off", "simulated steps cannot be timed")


def test_a_dropped_module_is_freed_while_it_is_tuned() -> None:
    def train(team: Any) -> None:
        training = Training(team, autotune=QUICK, bucket_bytes=START).steps(6)
        gc.collect()
        gc.disable()
        try:
            ref = weakref.ref(engine_of(training))
            del training
            assert ref() is None
        finally:
            gc.enable()

    run_teams(2, train)


def test_plain_training_is_as_before() -> None:
    def train(team: Any) -> Any:
        training = Training(team).steps(3)
        assert engine_of(training).binding.tuning is None
        return bagua.stats(training.model).tuning

    assert run_teams(2, train) == [None, None]


# -- real processes ------------------------------------------------------------------------------------------------


def in_a_process() -> tuple[Progress, Tensor]:
    training = Training(None, rank=dist.get_rank(), bucket_bytes=START).until_tuned()
    return training.progress, training.steps(2).weights


def uneven() -> tuple[str, int, Tensor]:
    rank = dist.get_rank()
    training = Training(None, rank=rank, bucket_bytes=START, autotune={**QUICK, "max_turns": 20})
    with bagua.join(training.model):
        training.steps(5 if rank else 30)
    return training.progress.phase, bagua.stats(training.model).steps, training.weights


def test_ranks_that_have_run_out_of_inputs_follow(pool: Any) -> None:
    (first, steps, weights), (second, others, same) = pool.run(2, uneven, timeout_s=60)
    assert first == second == "done"
    assert steps == others == 30
    assert torch.equal(weights, same)


def test_the_launchers_environment_tunes(pool: Any) -> None:
    env = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0", "BAGUA_AUTOTUNE_MAX_SAMPLES": "6"}
    (first, weights), (second, others) = pool.run(2, in_a_process, env=env, timeout_s=60)
    assert first == second
    assert first.phase == "done"
    assert 2 <= first.num_samples <= 6
    assert torch.equal(weights, others)
