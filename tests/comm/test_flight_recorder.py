"""Torch's flight recorder is off where threads can corrupt it, unless the user has asked for it."""

from __future__ import annotations

import os

import pytest

from bagua.comm.flight_recorder import avoid_race, recorded_collectives

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [
        ("2.11.0+cpu", {}, "0"),
        ("2.12.1", {}, "0"),
        ("2.13.0+cpu", {}, None),
        ("2.15.0+cu132", {}, None),
        ("2.11.0", {NAMES[0]: "2000"}, "2000"),
        ("2.11.0", {NAMES[1]: "100"}, None),
    ],
)
def test_off_before_2_13(
    monkeypatch: pytest.MonkeyPatch, version: str, given: dict[str, str], expected: str | None
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    avoid_race(version)
    assert os.environ.get(NAMES[0]) == expected


def test_nothing_is_read_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES[0], "0")
    assert recorded_collectives() is None
