"""Every exchange equals its mixing matrix times the stacked ranks, within what its codec loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua import codecs, topologies
from bagua.codecs import Codec
from bagua.comm.groups import Groups
from bagua.exchanges import AllGather, AllReduce, DifferenceGossip, Exchange, Gossip, Hierarchical, ScatterGather, mix
from bagua.exchanges.scatter_gather import chunk_numel
from tests.rank_threads import run_threads

SIZES = [1, 2, 3, 4]
NODES = [[0, 0], [0, 1], [0, 0, 1], [0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1]]
NUMELS = [1, 7, 64, 1000, 5001]


def values(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * n + rank), dtype=torch.float64).to(dtype)


def run_once(groups: Groups, exchange: Exchange, n: int, dtype: torch.dtype = torch.float32, steps: int = 1):
    x = values(groups.rank, n, dtype)
    state = exchange.init(torch.zeros_like(x), groups)
    for step in range(steps):
        exchange.run(x, state, groups, step)
    return x, sum(meter.sent for meter in groups.meters)


def expected_mix(topology: str, size: int, n: int, step: int = 0) -> torch.Tensor:
    matrix = torch.tensor(topologies.get(topology).matrix(size, step), dtype=torch.float64)
    return matrix @ torch.stack([values(rank, n).double() for rank in range(size)])


def bound(codec: str, n: int, size: int) -> float:
    stacked = torch.stack([values(rank, n).double() for rank in range(size)])
    span, top = float(stacked.max() - stacked.min()), float(stacked.abs().max())
    return {
        "identity": 1e-6,
        "bf16": top * size * 2**-7,
        "fp16": top * size * 2**-10,
        "minmax_uint8": 2 * 0.51 * span / 255 + 1e-5,
    }[codec]


@pytest.mark.parametrize("codec", ["identity", "bf16", "fp16", "minmax_uint8"])
@pytest.mark.parametrize("size", SIZES)
def test_complete(codec: str, size: int) -> None:
    for n in NUMELS:
        results = run_threads(size, run_once, mix("complete", codec), n)
        want = expected_mix("complete", size, n)
        for rank, (x, _) in enumerate(results):
            assert torch.equal(x, results[0][0]), "all ranks end with the same bits"
            assert (x.double() - want[rank]).abs().max() <= (bound(codec, n, size) if size > 1 else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("codec", ["identity", "bf16", "minmax_uint8"])
def test_payload_types(codec: str, dtype: torch.dtype) -> None:
    results = run_threads(3, run_once, mix("complete", codec), 1000, dtype)
    want = torch.stack([values(rank, 1000, dtype).double() for rank in range(3)]).mean(0)
    rounding = (
        float(want.abs().max()) * 3 * {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float64: 2**-22}[dtype]
    )
    for x, _ in results:
        assert x.dtype is dtype
        assert (x.double() - want).abs().max() <= bound(codec, 1000, 3) + rounding


@pytest.mark.parametrize("codec", ["identity", "minmax_uint8"])
def test_sum(codec: str) -> None:
    for x, _ in run_threads(3, run_once, mix("complete", codec, average=False), 100):
        assert (x.double() - 3 * expected_mix("complete", 3, 100)[0]).abs().max() <= 3 * bound(codec, 100, 3)


@pytest.mark.parametrize("topology", ["ring", "shift_one", "exponential"])
@pytest.mark.parametrize("codec", ["identity", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_gossip_is_its_matrix(topology: str, codec: str, size: int) -> None:
    def at_step(groups: Groups, step: int) -> torch.Tensor:
        x = values(groups.rank, 100)
        mix(topology, codec).run(x, {}, groups, step)
        return x

    for step in range(topologies.get(topology).period(size) + 1):
        want = expected_mix(topology, size, 100, step)
        for rank, x in enumerate(run_threads(size, at_step, step)):
            assert (x.double() - want[rank]).abs().max() <= bound(codec, 100, size)


@pytest.mark.parametrize("topology", ["ring"])
@pytest.mark.parametrize("size", SIZES)
def test_difference_gossip(topology: str, size: int) -> None:
    """Replicas equal their originals bit for bit, and consensus comes at the topology's rate."""
    n, steps = 500, 12

    def drive(groups: Groups) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        exchange = mix(topology, "minmax_uint8")
        start = torch.zeros(n)
        state = exchange.init(start, groups)
        x, seen = values(groups.rank, n), []
        for step in range(steps):
            exchange.run(x, state, groups, step)
            seen.append(x.clone())
        return seen, state

    results = run_threads(size, drive)
    for rank, (_, state) in enumerate(results):
        for k, (peer, _) in enumerate(topologies.get(topology).peers(rank, size, 0)):
            assert torch.equal(state["peers"][k], results[peer][1]["me"])
    mean = torch.stack([values(rank, n) for rank in range(size)]).mean(0)
    last = torch.stack([seen[-1] for seen, _ in results])
    spread = (last - last.mean(0)).abs().max()
    assert spread <= 0.05, f"no consensus: {spread}"
    assert (last.mean(0) - mean).abs().max() <= 0.05, "the mean is kept up to quantisation"


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("codec", ["identity", "minmax_uint8"])
@pytest.mark.parametrize("average", [True, False])
def test_hierarchical_weighs_ranks_not_nodes(nodes: list[int], codec: str, average: bool) -> None:
    size = len(nodes)
    exchange = mix("complete", codec, hierarchical=True, average=average)
    results = run_threads(size, run_once, exchange, 1000, nodes=nodes, hierarchical=True)
    want = expected_mix("complete", size, 1000)[0] * (1 if average else size)
    for x, _ in results:
        assert torch.equal(x, results[0][0])
        assert (x.double() - want).abs().max() <= bound(codec, 1000, size) * size


def test_hierarchical_gossip_mixes_node_means() -> None:
    nodes = [0, 0, 1]
    results = run_threads(3, run_once, mix("ring", hierarchical=True), 50, nodes=nodes, hierarchical=True)
    means = [(values(0, 50) + values(1, 50)) / 2, values(2, 50)]
    matrix = topologies.get("ring").matrix(2, 0)
    for rank, (x, _) in enumerate(results):
        row = matrix[nodes[rank]]
        assert torch.allclose(x, row[0] * means[0] + row[1] * means[1], atol=1e-6)


def test_error_feedback_loses_nothing_over_time() -> None:
    """The sum of what comes out follows the sum of what goes in: the error stays bounded instead of adding up."""
    n, size, steps = 300, 3, 50

    def drive(groups: Groups, exchange: Exchange) -> torch.Tensor:
        state = exchange.init(torch.zeros(n), groups)
        total = torch.zeros(n)
        for step in range(steps):
            x = values(groups.rank, n)
            exchange.run(x, state, groups, step)
            total += x
        return total

    want = steps * expected_mix("complete", size, n)[0]
    one = bound("minmax_uint8", n, size)
    with_feedback = run_threads(size, drive, mix("complete", "minmax_uint8", error_feedback=True))
    without = run_threads(size, drive, mix("complete", "minmax_uint8"))
    for total in with_feedback:
        assert (total - want).abs().max() <= 3 * one
    assert (without[0] - want).abs().max() > 3 * one, "the test would pass without error feedback"


def test_error_feedback_survives_an_overflow() -> None:
    def drive(groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        exchange = mix("complete", "minmax_uint8", error_feedback=True)
        state = exchange.init(torch.zeros(64), groups)
        bad = values(groups.rank, 64)
        bad[3] = float("inf") if groups.rank == 0 else 1.0
        exchange.run(bad, state, groups, 0)
        good = values(groups.rank, 64)
        exchange.run(good, state, groups, 1)
        return bad, good

    for bad, good in run_threads(2, drive):
        assert not bad.isfinite().all(), "GradScaler must see the overflow"
        assert good.isfinite().all()


@pytest.mark.parametrize("codec", ["identity", "bf16", "minmax_uint8"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_sent_are_what_is_said(codec: str, size: int) -> None:
    exchange, n = mix("complete", codec), 4096 * size
    for _, sent in run_threads(size, run_once, exchange, n):
        assert abs(sent - exchange.bytes_per_rank(n, size)) <= 1


def mean_of(size: int, n: int, codec: Codec, gather_codec: Codec) -> torch.Tensor:
    """What the chunks' owners make of the ranks' encoded chunks; two ranks decode each other's."""
    c = chunk_numel(n, size)
    x_RN, means = torch.zeros(size, size * c), []
    for rank in range(size):
        x_RN[rank, :n] = values(rank, n)
    for x_RC in x_RN.split(c, dim=1):
        mean_C = codec.decode_mean(codec.encode(x_RC), c, torch.empty(c), 1 / size)
        means.append(mean_C if size == 2 else gather_codec.decode(gather_codec.encode(mean_C[None]), c)[0])
    return torch.cat(means)[:n]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("codec", "gather_codec"), [("int4", "minmax_uint8:block=100"), ("eden", "eden:bits=3"), ("sign", "bf16")]
)
def test_means_in_another_codec(codec: str, gather_codec: str, size: int) -> None:
    exchange = mix("complete", codec, gather_codec=gather_codec)
    one, other = codecs.get(codec), codecs.get(gather_codec)
    for n in NUMELS:
        want = mean_of(size, n, one, other) if size > 1 else values(0, n)
        for x, sent in run_threads(size, run_once, exchange, n):
            assert torch.equal(x, want)
            assert sent == exchange.bytes_per_rank(n, size)
            rows = {1: 0, 2: 2 * one.wire_bytes(chunk_numel(n, 2))}
            both = sum(each.wire_bytes(chunk_numel(n, size)) for each in (one, other))
            assert sent == rows.get(size, (size - 1) * both)


def test_the_codec_of_means_is_shown_where_there_is_one() -> None:
    """Saved states hold the text, those from before the option too."""
    assert "gather_codec" not in repr(mix("complete", "int4"))
    exchange = mix("complete", "int4", gather_codec="eden")
    assert repr(exchange).endswith("running_scale=False, gather_codec=Eden(block=256, bits=1))")
    assert exchange.name == "scatter_gather[int4, means in eden]"


CELLS = {
    ("complete", "identity"): AllReduce,
    ("complete", "bf16"): AllReduce,
    ("complete", "minmax_uint8"): ScatterGather,
    ("complete", "int4"): ScatterGather,
    ("complete", "sign"): ScatterGather,
    ("complete", "top_k"): ScatterGather,
    ("ring", "int4"): DifferenceGossip,
    ("ring", "identity"): Gossip,
    ("ring", "fp16"): Gossip,
    ("ring", "minmax_uint8"): DifferenceGossip,
    ("shift_one", "identity"): Gossip,
    ("exponential", "bf16"): Gossip,
}


@pytest.mark.parametrize(("cell", "kind"), CELLS.items())
def test_table(cell: tuple[str, str], kind: type[Exchange]) -> None:
    assert type(mix(*cell)) is kind
    outer = mix(*cell, hierarchical=True)
    assert isinstance(outer, Hierarchical) and type(outer.inner) is kind
    assert mix(*cell) == mix(*cell) and hash(mix(*cell)) == hash(mix(*cell))


@pytest.mark.parametrize(
    ("arguments", "options", "both"),
    [
        (("shift_one", "minmax_uint8"), {}, ("shift_one", "minmax_uint8")),
        (("exponential", "minmax_uint8"), {}, ("exponential", "minmax_uint8")),
        (("complete", "identity"), {"error_feedback": True}, ("error_feedback", "identity")),
        (("complete", "bf16"), {"error_feedback": True}, ("error_feedback", "bf16")),
        (("ring", "minmax_uint8"), {"error_feedback": True}, ("error_feedback", "ring")),
        (("ring", "identity"), {"average": False}, ("average", "ring")),
        (("complete", "bf16"), {"gather_codec": "int4"}, ("gather_codec='int4'", "bf16")),
        (
            ("complete", "identity"),
            {"gather_codec": "int4", "error_feedback": True},
            ("gather_codec='int4'", "identity"),
        ),
        (("ring", "int4"), {"gather_codec": "sign"}, ("gather_codec='sign'", "ring")),
        (("complete", "int4"), {"gather_codec": "identity"}, ("gather_codec", "identity")),
        (("complete", "int4"), {"gather_codec": "int3"}, ("int3", "minmax_uint8")),
        (("circle", "identity"), {}, ("circle", "ring")),
        (("ring", "int3"), {}, ("int3", "minmax_uint8")),
    ],
)
def test_holes(arguments: tuple[str, str], options: dict[str, Any], both: tuple[str, str]) -> None:
    with pytest.raises(ValueError) as error:
        mix(*arguments, **options)
    assert all(word in str(error.value) for word in both)


def test_parts_refuse_each_other_without_mix_too() -> None:
    codec = codecs.get("minmax_uint8")
    with pytest.raises(ValueError, match="minmax_uint8"):
        AllReduce(codec)
    with pytest.raises(ValueError, match="minmax_uint8"):
        Gossip(topologies.get("ring"), codec)
    with pytest.raises(ValueError, match="identity"):
        ScatterGather(codecs.get("identity"), error_feedback=True)
    with pytest.raises(TypeError, match=r"^ScatterGather: gather_codec: .*'eden'"):
        ScatterGather(codec, gather_codec="eden")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Hierarchical"):
        Hierarchical(Hierarchical(AllReduce()))


@pytest.mark.parametrize(
    ("exchange", "make"),
    {
        "AllGather": AllGather,
        "AllReduce": AllReduce,
        "ScatterGather": ScatterGather,
        "Gossip": lambda codec: Gossip(topologies.get("ring"), codec),
        "DifferenceGossip": lambda codec: DifferenceGossip(topologies.get("ring"), codec),
    }.items(),
)
def test_a_name_is_no_codec(exchange: str, make: Callable[[Any], Exchange]) -> None:
    with pytest.raises(TypeError, match=rf"^{exchange}: codec: .*'sign'; bagua.codecs.get"):
        make("sign")
