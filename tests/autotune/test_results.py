"""What tuning leaves: the best settings, files of results and logs, states that are saved and loaded."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import bagua
from bagua.autotune import Settings
from bagua.autotune.progress import Progress
from tests.autotune.training import KIB, MIB, QUICK, START, Training, engine_of, pretend, small_buckets_are_fast
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams


def to_the_end(team: Any, **options: Any) -> tuple[Any, int, int, Tensor]:
    training = Training(team, autotune={**QUICK, **options}, bucket_bytes=START).until_tuned()
    met = team.counters.collectives
    training.steps(3)
    engine = engine_of(training)
    assert team.counters.collectives == met, "not a word any more"
    assert len(engine.pool.shared) == engine.dispatcher.num_busy_lanes
    return bagua.stats(training.model), training.made, met, training.weights


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


@pytest.mark.parametrize("content", ["{", 10**5 * "["])
def test_a_spoilt_file_is_told_to_all_ranks(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(content)
    first, second = run_teams(2, refused, str(path), str(path))
    assert first.startswith("ValueError: autotune: file")
    assert second.startswith("RankMismatchError: rank 0 cannot distribute its module: ValueError: autotune: file")


def test_a_spoilt_result_is_told_to_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is sound but for the entry of this job."""
    pretend(monkeypatch, small_buckets_are_fast)
    path = tmp_path / "tuned.json"
    run_teams(2, with_file, str(path), 24)
    content = json.loads(path.read_text())
    next(iter(content["results"].values()))["settings"]["num_lanes"] = 100000
    path.write_text(json.dumps(content))
    first, second = run_teams(2, refused, str(path), str(path))
    problem = "settings: 100000 is not a valid value of num_lanes"
    assert first.startswith("ValueError: autotune: file") and first.endswith(problem)
    assert second.startswith("RankMismatchError: rank 0 cannot distribute its module: ValueError: autotune: file")
    assert second.endswith(problem)


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


def resumed(steps: int, autotune_again: bool) -> tuple[Tensor, Tensor, Progress | None]:
    """Save after `steps`, go on; and load into a new model, and go on there. In a rank process."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, small_buckets_are_fast)
        first = Training(None, rank=rank, autotune={**QUICK, "max_turns": 20}, bucket_bytes=START).steps(steps)
        state, weights = bagua.state_dict(first.model), first.model.state_dict()
        weights = {name: value.clone() for name, value in weights.items()}
        second = Training(None, rank=rank, autotune=QUICK if autotune_again else False, bucket_bytes=START)
        second.model.load_state_dict(weights)
        bagua.load_state_dict(second.model, state)
        second.made = first.made
        found = first.steps(4).weights, second.steps(4).weights, bagua.stats(second.model).tuning
    for each in (first, second):
        bagua.detach(each.model)
    return found


@pytest.mark.parametrize("autotune_again", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_tuned_training_resumes_as_it_was(pool: RankPool, autotune_again: bool) -> None:
    for went_on, again, progress in pool.run(3, resumed, 24, autotune_again, nodes=[0, 1, 2]):
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
def test_a_state_saved_in_the_middle_of_tuning_holds_no_trial(pool: RankPool, autotune_again: bool) -> None:
    for went_on, again, progress in pool.run(2, resumed, 7, autotune_again):
        assert torch.equal(went_on, again), "two ranks, one order of summing"
        assert (progress is None) == (not autotune_again)
