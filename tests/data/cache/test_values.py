"""Values come back as they were, type by type, and damaged bytes never do more than raise ValueError."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua.data.cache.values import read_payload, write_payload

numpy = pytest.importorskip("numpy")


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, NaN included, at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t.reshape(-1) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, (numpy.ndarray, numpy.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(list(a), list(b), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


def again(value: Any) -> Any:
    return read_payload(memoryview(write_payload(value)))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers(allow_nan=False) | st.text()
    | st.binary() | st.builds(bytearray, st.binary()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner)
    | st.frozensets(st.integers() | st.text()),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(plain)
def test_nested_containers(value: Any) -> None:
    assert same(value, again(value))


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)], ids=str)
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    assert same([1, {"a": tensor}], again([1, {"a": tensor}]))


def test_views_are_stored_as_what_they_show() -> None:
    base = torch.arange(24.0).view(4, 6)
    for view in (base.t(), base[1:3, ::2], base[0].expand(3, 6), base.flip(0), torch.view_as_complex(
        base.view(4, 3, 2)).conj(), base.clone().requires_grad_()):  # fmt: skip
        assert torch.equal(again(view), view.detach().resolve_conj())
    assert len(write_payload(torch.zeros(1_000_000)[:3])) < 1000


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6).reshape(2, 3).T,
        numpy.array(2.5),
        numpy.zeros((0, 3), "float16"),
        numpy.array(["a", "bcd"]),
        numpy.array([b"a", b"bcd"]),
        numpy.array(["2026-11-21"], "datetime64[D]"),
        numpy.array([5], "timedelta64[s]"),
        numpy.array([1, 2], ">i4"),
        numpy.float32(1.5),
        numpy.int64(-3),
        numpy.bool_(True),
        numpy.array([1 + 2j]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_numpy(array: Any) -> None:
    assert same(array, again(array))
    assert same({"a": (array, array)}, again({"a": (array, array)}))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "I", "F", "LA", "I;16"])
def test_images(mode: str) -> None:
    image_module = pytest.importorskip("PIL.Image")
    grey = image_module.fromarray(numpy.arange(77, dtype="uint8").reshape(7, 11))
    image = grey.convert("I").convert("I;16") if mode == "I;16" else grey.convert("RGB").convert(mode)
    back = again({"image": image})["image"]
    assert back.mode == mode and back.size == (11, 7)
    assert back.tobytes() == image.tobytes()
    assert mode != "P" or back.getpalette() == image.getpalette()


def test_ordered_dicts_sizes_and_sets_keep_their_type() -> None:
    value = (OrderedDict(b=1, a=2), torch.Size([1, 2]), {1, 2}, frozenset({"x"}), {(1, "a"): [2]})
    assert same(value, again(value))


def test_the_payload_shares_nothing_with_the_value_and_its_parts_can_be_written_to() -> None:
    tensor, array = torch.ones(4), numpy.ones(4)
    payload = write_payload([tensor, array])
    tensor.zero_()
    array[:] = 0
    first, second = read_payload(memoryview(payload))
    assert first.tolist() == second.tolist() == [1, 1, 1, 1]
    first += 1
    second += 1
    assert read_payload(memoryview(payload))[0].tolist() == [2, 2, 2, 2], "reading made a copy"


class Odd:
    """Nothing that a cache knows."""


class OddList(list):
    """Would come back as something else."""


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, Odd()]}, r"sample\['a'\]\[1\]: a .*Odd"),
        (OddList(), "OddList"),
        ({Odd(): 1}, "a key of sample"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "on meta"),
        (torch.nn.Parameter(torch.zeros(1)), "Parameter"),
        (
            numpy.array([None]),
            "sample: a numpy array of dtype object cannot be cached, only of numbers, text and times; c",
        ),
        (numpy.zeros(2, [("a", "i4")]), r"of dtype \[\('a', '<i4'\)\] cannot"),
        (numpy.ma.array([1]), "MaskedArray"),
        (range(3), "range"),
    ],
)
def test_what_has_no_plain_form_is_refused_by_place(value: Any, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        write_payload(value)


def test_a_container_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contain itself"):
        write_payload(loop)


def test_damaged_payloads_raise_value_error_and_nothing_else() -> None:
    rng = random.Random(0)
    whole = write_payload({"x": torch.arange(5), "n": numpy.ones(3), "b": b"abc", "t": (1, 2.5, "text", 1 << 70)})
    outcomes = {"raised": 0, "read": 0}
    for _ in range(3000):
        damaged = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.randrange(1, 4)):
            if damaged:
                damaged[rng.randrange(min(len(damaged), 220))] = rng.randrange(256)
        try:
            read_payload(memoryview(damaged))
            outcomes["read"] += 1
        except ValueError:
            outcomes["raised"] += 1
    assert min(outcomes.values()) > 100


def test_a_payload_cannot_ask_for_more_than_it_holds() -> None:
    for outline in (b'{"tensor":["float32",[1000000000000],0,4]}', b'{"bytes":[0,100]}', b'{"bytes":[-8,8]}',
                    b'{"array":["O",[1],[0,8]]}', b'{"tensor":["float32",[-1,-1],0,4]}'):  # fmt: skip
        with pytest.raises(ValueError, match="damaged"):
            read_payload(memoryview(bytearray(len(outline).to_bytes(8, "little") + outline + bytes(128))))
