"""Objects that ranks exchange without pickle: what comes back, what is refused, what a peer cannot make run."""

from __future__ import annotations

import argparse
import datetime
import enum
import json
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch

from bagua.comm.objects import pack, unpack


class Point(NamedTuple):
    x: Any
    y: Any = 0


class Color(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    HIGH = 3


class Sides(enum.Flag):
    LEFT = 1
    RIGHT = 2


UTC = datetime.timezone.utc
KNOWN = {
    "namespace": argparse.Namespace(lr=0.1, shape=(2, 3), nested=types.SimpleNamespace(a=torch.float16)),
    "named": [Point(1, Point("a", b"b"))],
    "members": (Color.RED, Level.HIGH, Sides.RIGHT),
    "torch": [torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
    "times": [
        datetime.date(2024, 2, 29),
        datetime.time(1, 2, 3, 4),
        datetime.datetime(2024, 2, 29, 1, tzinfo=UTC),
        datetime.timedelta(days=-1, microseconds=5),
    ],
    Color.RED: Level.HIGH,
}


def test_objects_of_known_classes_go_and_come_back() -> None:
    back = unpack(pack(KNOWN))
    assert back == KNOWN and repr(back) == repr(KNOWN)
    assert type(back["named"][0]) is Point and type(back["members"][1]) is Level


@pytest.mark.parametrize(
    "bad",
    [Sides.LEFT | Sides.RIGHT, Point(1, object()), type("Local", (), {})(), Color, UTC],
)
def test_other_objects_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"obj.*cannot be sent; supported types: .*named tuples"):
        pack({"a": bad})


def test_numpy_arrays_of_objects_are_refused_by_dtype() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match="a numpy array of dtype object cannot be sent, only of numbers"):
        pack({"a": numpy.array([None])})


def test_a_peer_cannot_name_what_is_run() -> None:
    """Classes are looked up among imported modules, are not called, and must be what was said."""

    def message(outline: Any) -> bytes:
        text = json.dumps(outline).encode()
        return len(text).to_bytes(8, "little") + text

    here = __name__
    bad = [
        {"namedtuple": ["subprocess", "Popen", ["args"], ["true"]]},
        {"namedtuple": ["antigravity", "Popen", [], []]},
        {"namedtuple": [here, "Point", ["x"], [1]]},
        {"namedtuple": [here, "Point", ["x", "y"], [1]]},
        {"enum": ["os", "system", "true"]},
        {"enum": [here, "Color", "__class__"]},
        {"enum": [here, "Color.RED", "name"]},
        {"dtype": "load"},
        {"device": ["nonsense", 0]},
        {"reduce": ["os", "system"]},
    ]
    for outline in bad:
        with pytest.raises(ValueError):
            unpack(message(outline))
    assert "antigravity" not in sys.modules
