"""An exchange that reads elements where they lie gives the bits of one whose payload was filled before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bagua import codecs, exchanges
from bagua.codecs import MinMaxUInt8
from bagua.comm.groups import Groups
from bagua.exchanges import (
    AllReduce,
    ElementwiseHook,
    Exchange,
    LerpHook,
    PayloadSource,
    Piece,
    PowerSGD,
    ScatterGather,
    mix,
    scatter_gather,
)
from bagua.exchanges import payload_source as source_module
from tests.daily import one_in
from tests.exchanges.test_exchanges import values
from tests.rank_threads import run_threads

NATIVE = any(name.startswith("native") for name in codecs.available_backends())
EXCHANGES = [
    AllReduce(direct_bytes=0),
    AllReduce(average=False, direct_bytes=0),
    AllReduce(codecs.get("bf16"), direct_bytes=0),
    AllReduce(),
    AllReduce(codecs.get("bf16")),
    mix("complete", "minmax_uint8"),
    mix("complete", "minmax_uint8", error_feedback=True),
    mix("complete", "minmax_uint8", average=False),
    mix("complete", "int4", error_feedback=True),
    mix("complete", "sign", error_feedback=True),
    mix("complete", "top_k", error_feedback=True),
    ScatterGather(MinMaxUInt8(block=None)),
]


class Twice:
    """Doubles on the way in, adds the element's place on the way out, and notes what it saw."""

    def __init__(self) -> None:
        self.entered: list[tuple[int, int, int]] = []
        self.left: list[tuple[int, int, int]] = []

    def enter(self, index: int, lo: int, hi: int, x: Tensor, out: Tensor) -> Tensor:
        self.entered.append((index, lo, hi))
        return torch.mul(x, 2.0, out=out)

    def leave(self, index: int, lo: int, hi: int, x: Tensor) -> None:
        self.left.append((index, lo, hi))
        x.add_(torch.arange(lo, hi) + 1000.0 * index)


def pieces_of(x_N: Tensor, flat_N: Tensor, sizes: Sequence[int]) -> list[Piece]:
    """Every second tensor lies elsewhere, the others in the payload."""
    pieces, at = [], 0
    for index, size in enumerate(sizes):
        if size:
            home = flat_N[at : at + size]
            if index % 2:
                pieces.append(Piece(at, at + size, x_N[at : at + size].clone(), index))
            else:
                home.copy_(x_N[at : at + size])
                pieces.append(Piece(at, at + size, home, index))
        at += size
    return pieces


def both(groups: Groups, exchange: Exchange, sizes: Sequence[int], with_hook: bool) -> None:
    n = sum(sizes)
    want, flat = values(groups.rank, n), torch.full((n,), float("nan"))
    states = [exchange.init(torch.zeros(n), groups) for _ in range(2)]
    for step in range(2):
        hook, plain = Twice(), Twice()
        want = values(groups.rank + 10 * step, n)
        flat.fill_(float("nan"))
        source = PayloadSource(flat, pieces_of(want, flat, sizes), hook if with_hook else None)
        exchange.run_from(source, states[0], groups, step)
        if with_hook:
            want.mul_(2.0)
        exchange.run(want, states[1], groups, step)
        if with_hook:
            at = 0
            for index, size in enumerate(sizes):
                plain.leave(index, 0, size, want[at : at + size])
                at += size
            for seen in (hook.entered, hook.left):
                covered = sorted((index, place) for index, lo, hi in seen for place in range(lo, hi))
                assert covered == [(index, place) for index, size in enumerate(sizes) for place in range(size)]
        assert torch.equal(flat, want), (exchange, step)
        for name, state in states[1].items():
            assert torch.equal(states[0][name], state), name


def both_of_each(groups: Groups, exchange: Exchange, layouts: Sequence[Sequence[int]], with_hook: bool) -> None:
    for sizes in layouts:
        both(groups, exchange, sizes, with_hook)


@pytest.mark.parametrize(("exchange", "size", "with_hook"), one_in(2, EXCHANGES, [1, 2, 3], [False, True]), ids=str)
def test_same_bits(exchange: Exchange, size: int, with_hook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_CACHED", 1500)
    if size > 1 or not with_hook:  # a single rank exchanges nothing, and the engine does not ask it to
        run_threads(size, both_of_each, exchange, ([5000], [3, 4000, 0, 1, 2500, 1024, 30], [7] * 5), with_hook)


class Delegates:
    """The same hook as another one, but one that no codec knows."""

    def __init__(self, hook: ElementwiseHook) -> None:
        self._hook = hook

    def enter(self, index: int, lo: int, hi: int, x: Tensor, out: Tensor) -> Tensor:
        return self._hook.enter(index, lo, hi, x, out)

    def leave(self, index: int, lo: int, hi: int, x: Tensor) -> None:
        self._hook.leave(index, lo, hi, x)


def lerped_each(groups: Groups, exchange: Exchange, layouts: Sequence[Sequence[int]]) -> None:
    for sizes in layouts:
        lerped(groups, exchange, sizes)


def lerped(groups: Groups, exchange: Exchange, sizes: Sequence[int]) -> None:
    n = sum(sizes)
    others = [None if k == 2 else (values(50 + k, size), 0.9, -9.0) for k, size in enumerate(sizes)]
    states = [exchange.init(torch.zeros(n), groups) for _ in range(2)]
    for step in range(3):
        x, flats = values(groups.rank + 10 * step, n), [torch.full((n,), float("nan")) for _ in range(2)]
        for flat, state, hook in zip(flats, states, (LerpHook(others), Delegates(LerpHook(others))), strict=True):
            exchange.run_from(PayloadSource(flat, pieces_of(x, flat, sizes), hook), state, groups, step)
        assert torch.equal(*flats)
        for name, state in states[1].items():
            assert torch.equal(states[0][name], state), name


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
def test_lerps_by_the_codec_or_before_it(exchange: Exchange, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_CACHED", 1500)
    run_threads(size, lerped_each, exchange, ([5000], [3, 4000, 3000, 1, 2500, 1024, 30], [7] * 5))


def drive(groups: Groups, exchange: Exchange, numels: Sequence[int]) -> dict[int, list[Tensor]]:
    """By number of elements: what comes of three steps."""
    found: dict[int, list[Tensor]] = {}
    for n in numels:
        state, found[n] = exchange.init(torch.zeros(n), groups), []
        for step in range(3):
            x = values(groups.rank + 10 * step, n)
            exchange.run(x, state, groups, step)
            found[n] += [x, *(each.clone() for each in state.values())]
    return found


@pytest.mark.skipif(not NATIVE, reason="needs the compiled codecs")
@pytest.mark.parametrize("codec", ["minmax_uint8", "sign"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_in_parts_are_whole_rows(codec: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = mix("complete", codec, error_feedback=True)
    numels = [1, 20, 33, 64, 1023, 5001, 8192, 8200]
    in_parts = run_threads(size, drive, exchange, numels)
    monkeypatch.setattr(scatter_gather, "takes_parts", lambda codec, x_N: False)
    for ours, whole in zip(in_parts, run_threads(size, drive, exchange, numels), strict=True):
        for n in numels:
            assert all(torch.equal(a, b) for a, b in zip(ours[n], whole[n], strict=True)), n


@pytest.mark.parametrize("feedback", [True, False])
def test_power_sgd(feedback: bool) -> None:
    sizes = [40 * 30, 7, 50 * 20, 64]
    exchange = PowerSGD(((40, 30), (1, 7), (50, 20), (1, 64)), rank=2, error_feedback=feedback)
    run_threads(3, both, exchange, sizes, False)
    run_threads(2, both, exchange, sizes, True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_overflow_does_not_come_back(bad: float) -> None:
    def overflowing(groups: Groups) -> None:
        exchange = PowerSGD(((40, 30),), rank=2)
        state = exchange.init(torch.zeros(1200), groups)
        for step in range(3):
            x = values(groups.rank + 10 * step, 1200)
            if step == 1 and groups.rank == 0:
                x[77] = bad
            exchange.run(x, state, groups, step)
            assert bool(x.isfinite().all()) == (step != 1)
            assert state["error"].isfinite().all() and state["right"].isfinite().all()

    run_threads(2, overflowing)


def test_hierarchical() -> None:
    exchange = mix("complete", "minmax_uint8", hierarchical=True)
    run_threads(3, both, exchange, [100, 2000], True, nodes=[0, 0, 1], hierarchical=True)


@pytest.mark.parametrize("with_hook", [False, True])
def test_of_a_part(with_hook: bool) -> None:
    x, flat = values(0, 300), torch.zeros(300)
    hook: ElementwiseHook | None = Twice() if with_hook else None
    whole = PayloadSource(flat, pieces_of(x, flat, [100, 150, 50]), hook)
    part = whole.part(90, 270)
    part.fill(0, 180)
    factor = 2.0 if with_hook else 1.0
    assert torch.equal(flat[90:270], x[90:270] * factor)
    assert not flat[250:270].equal(torch.zeros(20))
    part.leave(0, 180)
    if isinstance(hook, Twice):
        assert hook.left == [(0, 90, 100), (1, 0, 150), (2, 0, 20)]


@pytest.mark.parametrize("align", [1, 64, 1000])
def test_ranges_are_whole_blocks(align: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_CACHED", 256)
    x = torch.zeros(5000)
    source = PayloadSource(x, pieces_of(x, x, [3, 2000, 64, 65, 2868]))
    for lo, hi in ((0, 5000), (1000, 4999), (4998, 5000)):
        for cached in (False, True):
            ranges = list(source.ranges(lo, hi, align, cached))
            assert [a for a, _ in ranges] == [lo, *[b for _, b in ranges[:-1]]]
            assert ranges[-1][1] == hi
            assert all((b - a) % align == 0 for a, b in ranges[:-1])
            most = source.scratch_numel(align)
            assert all(b - a <= most for a, b in ranges if cached)


def test_only_what_gains_by_it_reads() -> None:
    cpu = torch.zeros(4)
    assert AllReduce().reads(cpu)
    assert not mix("complete", "top_k").reads(cpu)
    assert not mix("ring", "minmax_uint8").reads(cpu)
    if NATIVE:
        compiled = next(name for name in codecs.available_backends() if name.startswith("native"))
        with codecs.use_backend(compiled):
            assert mix("complete", "sign").reads(cpu)
            assert not mix("complete", "sign").reads(cpu.double())


@pytest.mark.parametrize(
    ("old", "new"), [("Source", "PayloadSource"), ("Passage", "ElementwiseHook"), ("Lerps", "LerpHook")]
)
def test_old_names(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"{old} is called {new} now"):
        assert getattr(exchanges, old) is getattr(exchanges, new)


def test_old_name_of_the_hook() -> None:
    x, hook = torch.zeros(3), Twice()
    with pytest.warns(FutureWarning, match="called hook now"):
        assert PayloadSource(x, pieces_of(x, x, [3]), hook).passage is hook
