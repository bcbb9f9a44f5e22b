"""What users may say, and what they are told if it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagua.autotune import ALWAYS_DIRECT, Autotune, Settings, as_options
from bagua.autotune.saved import load, save

SETTINGS = Settings(1 << 20, 4, 8 << 20, 2 << 20, False)


def test_forms(tmp_path: Path) -> None:
    assert as_options(True) == Autotune()
    assert as_options(False) is None
    assert as_options(None) is None
    assert as_options(Autotune(max_samples=3)).max_samples == 3  # type: ignore[union-attr]
    assert as_options({"max_turns": 20}) == Autotune(max_turns=20)
    assert as_options("a.json") == Autotune(file="a.json")
    assert as_options(tmp_path / "a.json") == Autotune(file=str(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3, TypeError, "autotune: expected a bool"),
        ({"speed": 1}, ValueError, "unknown option 'speed'"),
        ({"max_samples": 0}, ValueError, "max_samples must be an integer >= 1, got 0"),
        ({"max_samples": True}, ValueError, "max_samples"),
        ({"max_turns": 5}, ValueError, "max_turns must be an integer >= 16"),
        ({"warmup_time_s": -1}, ValueError, "warmup_time_s"),
        ({"sampling_confidence_time_s": float("inf")}, ValueError, "sampling_confidence_time_s"),
        ({"search": "luck"}, ValueError, "search must be one of neighbours, halving, random, exhaustive, got 'luck'"),
        ({"file": ""}, TypeError, "file"),
        ({"log": 3}, TypeError, "log"),
    ],
)
def test_wrong_arguments_are_named(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="autotune: ") as caught:
        as_options(value)
    assert message in str(caught.value)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_AUTOTUNE_MAX_SAMPLES", "7")
    assert as_options(None) is None
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    monkeypatch.setenv("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", "0.5")
    monkeypatch.setenv("BAGUA_AUTOTUNE_WARMUP_TIME_S", "3")
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "1")
    wanted = Autotune(max_samples=7, sampling_confidence_time_s=0.5, warmup_time_s=3, log=True)
    assert as_options(None) == wanted
    assert as_options(False) is None, "the argument counts"
    # The original took any text, "0" too, for yes.
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0")
    assert as_options(None) == Autotune(max_samples=7, sampling_confidence_time_s=0.5, warmup_time_s=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BAGUA_AUTOTUNE", "yes"),
        ("BAGUA_AUTOTUNE_MAX_SAMPLES", "many"),
        ("BAGUA_AUTOTUNE_WARMUP_TIME_S", "long"),
        ("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "maybe"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}: .*{value}"):
        as_options(None)


def test_settings_survive_json() -> None:
    assert Settings.from_json(json.loads(json.dumps(SETTINGS.as_json()))) == SETTINGS
    assert SETTINGS.describe() == "buckets of 1 MiB, 4 lanes, pieces of 8 MiB, direct up to 2 MiB"
    other = Settings(1 << 19, 1, None, ALWAYS_DIRECT, True)
    assert Settings.from_json(other.as_json()) == other
    assert other.describe() == "buckets of 0.5 MiB, 1 lane, always direct, hierarchical"


@pytest.mark.parametrize(
    "change",
    [{"num_lanes": 0}, {"num_lanes": 65}, {"bucket_bytes": 1.5}, {"bucket_bytes": 0}, {"hierarchical": 1}, {"more": 1}],
)
def test_settings_from_others_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Settings.from_json({**SETTINGS.as_json(), **change})


def test_results_are_kept_by_key(tmp_path: Path) -> None:
    path = str(tmp_path / "tuned.json")
    assert load(path, "a") is None
    save(path, "a", SETTINGS, {"best_step_s": 0.1})
    other = Settings(1, 1, None, 0, True)
    save(path, "b", other, {})
    assert load(path, "a") == SETTINGS
    assert load(path, "b") == other
    assert load(path, "c") is None
    assert [each.name for each in tmp_path.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "does not hold autotuning results"),
        ('{"version": 2, "results": {}}', "does not hold autotuning results"),
        ('{"version": 1, "results": {"a": {}}}', "entry 'a'"),
        ('{"version": 1, "results": {"a": {"settings": {"num_lanes": 3}}}}', "entry 'a'"),
        (" " * (10 * 2**20 + 1), "is larger than"),
    ],
)
def test_a_spoilt_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load(str(path), "a")
    assert "tuned.json" in str(caught.value)
