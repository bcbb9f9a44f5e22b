"""An entry that is not whole is never returned."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from bagua.data.cache import frame as module
from bagua.data.cache.frame import make_frame, make_key, read_frame, seal_frame


@pytest.fixture(params=["xxh3", "crc32"])
def _checksum(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "crc32":
        monkeypatch.setattr(module, "xxh3_64", None)
    else:
        pytest.importorskip("xxhash")


def sealed(key: bytes, value: object, serializer: str = "plain") -> bytearray:
    frame = make_frame(key, value, serializer)
    seal_frame(frame)
    return frame


@pytest.mark.usefixtures("_checksum")
def test_every_single_flipped_bit_and_every_cut_is_noticed() -> None:
    key = make_key("d", 1)
    whole = sealed(key, {"x": torch.arange(3), "y": "text"})
    assert read_frame(key, whole)["y"] == "text"
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="damaged"):
            read_frame(key, damaged)
    for length in range(len(whole)):
        with pytest.raises(ValueError, match="damaged"):
            read_frame(key, whole[:length])


@pytest.mark.usefixtures("_checksum")
def test_pages_that_were_never_written_are_noticed() -> None:
    key = make_key("d", 1)
    whole = sealed(key, torch.ones(8192))
    for begin in range(4096, len(whole) - 4096, 4096):
        damaged = bytearray(whole)
        damaged[begin : begin + 4096] = bytes(4096)
        with pytest.raises(ValueError, match="checksum"):
            read_frame(key, damaged)


def test_an_entry_is_only_read_under_its_own_key() -> None:
    whole = sealed(make_key("d", 1), "one")
    with pytest.raises(ValueError, match="belongs to another entry"):
        read_frame(make_key("d", 2), whole)


def test_an_entry_without_checksum_is_not_read() -> None:
    with pytest.raises(ValueError, match="checksum"):
        read_frame(make_key("d", 1), make_frame(make_key("d", 1), "one"))


def test_entries_written_with_xxhash_are_misses_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xxhash")
    whole = sealed(make_key("d", 1), "one")
    monkeypatch.setattr(module, "xxh3_64", None)
    with pytest.raises(ValueError, match="unknown kind"):
        read_frame(make_key("d", 1), whole)


def test_keys_of_different_samples_differ() -> None:
    keys = [1, -1, "1", b"1", "", b"", 0, 1 << 80, "\ud800", "a_b"]
    names = ["", "a", "a_b", "ä"]
    made = [make_key(name, key) for name, key in itertools.product(names, keys)]
    assert len(set(made)) == len(made)
    assert make_key("a", "b_c") != make_key("a_b", "c")
    assert make_key("a", 1) == make_key("a", 1)
    with pytest.raises(TypeError, match="key"):
        make_key("a", 1.5)  # pyright: ignore[reportArgumentType]


class Exploit:
    """What it does when unpickled shows in the environment."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return os.putenv, ("BAGUA_EXPLOITED", "1")


def test_pickles_are_read_by_explicit_choice_only(monkeypatch: pytest.MonkeyPatch) -> None:
    key = make_key("d", 1)
    called: list[object] = []
    monkeypatch.setattr(module.pickle, "loads", lambda data: called.append(data))
    with pytest.raises(ValueError, match="belongs to another entry"):
        read_frame(key, sealed(key, Exploit(), "pickle"))
    assert not called
    monkeypatch.undo()
    assert read_frame(key, sealed(key, {1: {2}}, "pickle"), "pickle") == {1: {2}}
    with pytest.raises(ValueError, match="belongs to another entry"):
        read_frame(key, sealed(key, 1), "pickle")
