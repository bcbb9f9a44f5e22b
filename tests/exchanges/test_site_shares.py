"""Sites with as many hosts each: every host sums and exchanges a share, and passes the result on to its site."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bagua import topologies
from bagua.codecs import Codec, Eden, Identity, Int4, MinMaxUInt8, TopK, get
from bagua.comm.groups import Groups
from bagua.comm.mesh import why_no_mesh
from bagua.exchanges import AllReduce, Exchange, Gossip, Hierarchical, PowerSGD, ScatterGather
from bagua.exchanges.base import State
from tests.daily import one_in
from tests.rank_threads import run_threads

TWO_BY_THREE = ["a:0", "b:1", "a:2", "a:3", "b:4", "b:5"]
THREE_BY_TWO = ["a:0", "a:1", "b:2", "b:3", "c:4", "c:5"]
UNEVEN_HOSTS = ["a:0", "a:0", "a:1", "b:2", "b:3", "b:3", "b:3"]  # two hosts a site, of one to three ranks
LAYOUTS = {"two sites": TWO_BY_THREE, "three sites": THREE_BY_TWO, "ranks of hosts": UNEVEN_HOSTS}
EXCHANGES: dict[str, Exchange] = {
    "sums": AllReduce(),
    "16 bits": AllReduce(get("bf16")),
    "identity": ScatterGather(Identity()),
    "8 bits": ScatterGather(MinMaxUInt8()),
    "4 bits, feedback": ScatterGather(Int4(), error_feedback=True),
    "1 bit, scaled": ScatterGather(Eden(bits=1), running_scale=True),
    "1 bit, scaled, means in 3": ScatterGather(Eden(bits=1), running_scale=True, gather_codec=Eden(bits=3)),
    "a sum": ScatterGather(MinMaxUInt8(), average=False),
}
SIZES = (0, 1, 40, 4096, 5003)
NATIVE = [False, pytest.param(True, marks=pytest.mark.skipif(bool(why_no_mesh()), reason="no native transport"))]


def places(groups: Groups) -> tuple[int, ...] | None:
    return groups.column.ranks if groups.column is not None else None


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (TWO_BY_THREE, [(0, 1), (0, 1), (2, 4), (3, 5), (2, 4), (3, 5)]),
        (THREE_BY_TWO, [(0, 2, 4), (1, 3, 5)] * 3),
        (UNEVEN_HOSTS, [(0, 3), None, (2, 4), (0, 3), (2, 4), None, None]),
        (["a:0", "a:1", "b:2"], [None] * 3),  # unequal sites
        (["a:0", "a:0", "b:1", "b:1"], [None] * 4),  # one host a site
        (["a:0", "a:1"], [None] * 2),  # one site
        ([0, 0, 1, 1], [None] * 4),  # no sites
    ],
)
def test_hosts_at_the_same_place_of_their_sites(nodes: list[Any], expected: list[tuple[int, ...] | None]) -> None:
    assert run_threads(len(nodes), places, nodes=nodes, hierarchical=True) == expected


def exchanged(groups: Groups, exchange: Exchange, sizes: tuple[int, ...], late: bool) -> list[Any]:
    """Results of two steps each, and their state, and bytes sent between sites and within one."""
    found: list[Any] = []
    groups.begin(0, late)
    column, site = groups.column, groups.hosts
    assert column is None or (column.mesh is not None) == groups.native
    for n in sizes:
        state = exchange.init(torch.zeros(n), groups)
        between, within = (each.meter.sent if each is not None else 0 for each in (column, site))
        results = list[Tensor]()
        for step in range(2):
            x_N = payload(n, groups.rank, step)
            exchange.run(x_N, state, groups, step)
            results.append(x_N)
        sent = [
            (each.meter.sent if each is not None else 0) - before
            for each, before in ((column, between), (site, within))
        ]
        found.append((results, {name: each.clone() for name, each in state.items()}, sent))
    return found


def payload(n: int, rank: int, step: int) -> Tensor:
    """Of integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * n + 10 * rank + step)
    return torch.randint(-1000, 1000, (n,), generator=generator).float()


def among_sites(groups: Groups, exchange: Exchange, shares: list[list[Tensor]]) -> list[Tensor]:
    """The same on one rank for each site, with payloads that are already summed."""
    results, state = list[Tensor](), exchange.init(torch.zeros_like(shares[0][0]), groups)
    for step, each in enumerate(shares):
        x_N = each[groups.rank].clone()
        exchange.run(x_N, state, groups, step)
        results.append(x_N)
    return results


@pytest.mark.parametrize(("name", "layout", "native"), one_in(2, EXCHANGES, LAYOUTS, NATIVE))
def test_each_share_is_what_its_hosts_exchange(name: str, layout: str, native: bool) -> None:
    nodes, exchange = LAYOUTS[layout], EXCHANGES[name]
    size, sites = len(nodes), sorted({node.partition(":")[0] for node in nodes})
    found = run_threads(
        size, exchanged, Hierarchical(exchange, Identity()), SIZES, False, nodes=nodes, hierarchical=True, native=native
    )
    num_hosts = len(set(nodes)) // len(sites)
    for number, n in enumerate(SIZES):
        states = [each[number][1] for each in found]
        ends = next((state["share"] for state in states if "share" in state), None) if found[0][number][1] else None
        each_share = -(-n // (16 * num_hosts)) * 16
        assert ends is None or ends.tolist() == [0, min(each_share, n), 0, 0]
        kept = [state["magnitude"] for state in states if "magnitude" in state]
        assert all(torch.equal(each, kept[0]) and each.numel() == n for each in kept)
        for step in range(2):
            results = [each[number][0][step] for each in found]
            assert all(torch.equal(result, results[0]) for result in results)
        for place in range(num_hosts if n else 0):
            lo, hi = min(place * each_share, n), min((place + 1) * each_share, n)
            shares = [[site_sum(n, step, site, nodes, exchange)[lo:hi] for site in sites] for step in range(2)]
            expected = run_threads(len(sites), among_sites, exchange, shares, nodes=range(len(sites)))[0]
            for step in range(2):
                assert torch.equal(found[0][number][0][step][lo:hi], expected[step])
        if n == 5003:
            check_bytes([each[number][2] for each in found], exchange, n, nodes, len(sites))


@pytest.mark.parametrize(("name", "layout"), one_in(2, EXCHANGES, LAYOUTS))
def test_through_host_memory_the_bits_are_the_same(name: str, layout: str) -> None:
    nodes, exchange = LAYOUTS[layout], Hierarchical(EXCHANGES[name])
    plain, staged = (
        run_threads(len(nodes), exchanged, exchange, SIZES, False, nodes=nodes, hierarchical=True, staged=staged)
        for staged in (False, True)
    )
    for one, other in zip(plain, staged, strict=True):
        for (results, _, sent), (others, _, also_sent) in zip(one, other, strict=True):
            assert all(map(torch.equal, results, others)) and sent == also_sent


def site_sum(n: int, step: int, site: str, nodes: list[str], exchange: Exchange) -> Tensor:
    """Of the ranks of a site, scaled for the exchange among sites."""
    total = sum((payload(n, rank, step) for rank, node in enumerate(nodes) if node[0] == site), torch.zeros(n))
    num_sites = len({node.partition(":")[0] for node in nodes})
    return total * (num_sites / len(nodes)) if getattr(exchange, "average", True) else total


def check_bytes(sent: list[list[int]], exchange: Exchange, n: int, nodes: list[str], num_sites: int) -> None:
    """Between sites as much as one leader would send; in a site a payload, and a result, encoded if it can be."""
    num_hosts = len(set(nodes)) // num_sites
    total = sum(between for between, _ in sent) / num_sites / 2  # of two steps
    assert total == pytest.approx(exchange.bytes_per_rank(n, num_sites), rel=0.05)
    codec = getattr(exchange, "codec", None)
    encoded = codec.wire_bytes(n) / n if codec is not None and exchange.encodes else None
    result = 4 * n if encoded is None else (2 if num_sites == 2 else 1) * encoded * n
    for between, within in sent:
        if between:
            assert within / 2 == pytest.approx((num_hosts - 1) / num_hosts * (4 * n + result), rel=0.1)


@pytest.mark.parametrize("name", ["4 bits, feedback", "8 bits"])
def test_the_bits_of_two_latencies(name: str) -> None:
    exchange = Hierarchical(EXCHANGES[name])
    usual, late = (
        run_threads(6, exchanged, exchange, SIZES, how, nodes=THREE_BY_TWO, hierarchical=True) for how in (False, True)
    )
    for one, other in zip(usual, late, strict=True):
        for (results, state, _), (others, late_state, _) in zip(one, other, strict=True):
            assert all(map(torch.equal, results, others))
            if "chunk_residual" in state:
                assert late_state["chunk_residual"].numel() == 3 * state["chunk_residual"].numel()


def distances(groups: Groups, exchange: Exchange, n: int) -> tuple[Tensor, int]:
    """The result of Gaussian gradients less their mean, and what was sent within the site."""
    x_N = torch.randn(n, generator=torch.Generator().manual_seed(groups.rank))
    mean_N = sum(torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(groups.size)) / groups.size
    groups.begin(0, False)
    exchange.run(x_N, exchange.init(x_N, groups), groups, 0)
    return x_N - mean_N, groups.hosts.meter.sent if groups.hosts is not None else 0


@pytest.mark.parametrize("codec", [Eden(bits=1), Int4(), MinMaxUInt8()])
@pytest.mark.parametrize("layout", ["two sites", "three sites", "ranks of hosts"])
def test_sums_in_16_bits_within_a_site(layout: str, codec: Codec) -> None:
    """They send half as much, and add next to nothing to the error of the exchange between the sites."""
    inner, nodes, n = ScatterGather(codec), LAYOUTS[layout], 20000
    exact, encoded = (
        run_threads(len(nodes), distances, each, n, nodes=nodes, hierarchical=True)
        for each in (Hierarchical(inner, Identity()), Hierarchical(inner))
    )
    for found in (exact, encoded):
        assert all(torch.equal(x_N, found[0][0]) for x_N, _ in found)
    assert 0 < encoded[0][0].norm() < 1.05 * exact[0][0].norm()
    hosts = len(set(nodes)) // len({node[0] for node in nodes})
    assert exact[0][1] - encoded[0][1] == pytest.approx(2 * n * (hosts - 1) / hosts, rel=0.02)


def test_sums_in_16_bits_leave_small_elements_beside_large_ones() -> None:
    """Zeros stay zeros, and the error of each element is relative to it. Overflow stays visible."""

    def summed(groups: Groups) -> Tensor:
        generator = torch.Generator().manual_seed(groups.rank)
        x_N = torch.randn(4096, generator=generator) * torch.logspace(-12, 12, 4096)
        x_N[::7], x_N[100] = 0.0, float("inf")
        Hierarchical(ScatterGather(Identity()), get("bf16")).run(x_N, {}, groups, 0)
        return x_N

    def exact(groups: Groups) -> Tensor:
        generator = torch.Generator().manual_seed(groups.rank)
        return torch.randn(4096, generator=generator) * torch.logspace(-12, 12, 4096) / groups.size

    each = run_threads(6, exact, nodes=TWO_BY_THREE, hierarchical=True)
    most = torch.stack(each).abs().amax(0)
    for x_N in run_threads(6, summed, nodes=TWO_BY_THREE, hierarchical=True):
        assert not x_N[::7].any() and x_N[100] == float("inf")
        error = (x_N - torch.stack(each).sum(0)).abs()[torch.arange(4096) % 7 > 0]
        of = most[torch.arange(4096) % 7 > 0]
        assert (error[error.isfinite()] < 0.03 * of[error.isfinite()]).all() and error.isinf().sum() == 1


def test_fp64_stays_exact_with_the_identity() -> None:
    def summed(groups: Groups) -> Tensor:
        x_N = torch.full((100,), 1.0 + 2.0**-40, dtype=torch.float64)
        Hierarchical(AllReduce(), Identity()).run(x_N, {}, groups, 0)
        return x_N

    for x_N in run_threads(6, summed, nodes=TWO_BY_THREE, hierarchical=True):
        torch.testing.assert_close(x_N, torch.full_like(x_N, 1.0 + 2.0**-40), rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", [Eden(bits=1), MinMaxUInt8()])
def test_other_dtypes_end_with_the_same_bits_on_all_ranks(codec: Codec, dtype: torch.dtype) -> None:
    def summed(groups: Groups) -> Tensor:
        x_N = payload(4096, groups.rank, 0).to(dtype)
        exchange = Hierarchical(ScatterGather(codec, running_scale=isinstance(codec, Eden)))
        exchange.run(x_N, exchange.init(x_N, groups), groups, 0)
        return x_N

    found = run_threads(6, summed, nodes=TWO_BY_THREE, hierarchical=True)
    assert found[0].any() and all(torch.equal(x_N, found[0]) for x_N in found)


def test_what_encodes_the_addends_of_a_site() -> None:
    assert {name: each.addend_codec is not None for name, each in EXCHANGES.items()} == {
        "sums": False, "16 bits": False, "identity": False, "8 bits": True, "4 bits, feedback": True,
        "1 bit, scaled": True,
        "1 bit, scaled, means in 3": True, "a sum": True,
    }  # fmt: skip
    assert ScatterGather(get("bf16")).addend_codec is None and ScatterGather(TopK(0.9)).addend_codec is None
    with pytest.raises(TypeError, match="Hierarchical: site_codec: expected a Codec, got 'int4'"):
        Hierarchical(AllReduce(), "int4")  # type: ignore[arg-type]


def test_states_are_saved_under_the_name_of_before() -> None:
    inner = "ScatterGather(codec=Int4(block=128), error_feedback=True, average=True, running_scale=False)"
    assert repr(Hierarchical(EXCHANGES["4 bits, feedback"])) == f"Hierarchical(inner={inner})"
    assert repr(Hierarchical(AllReduce(), Identity())) == f"Hierarchical(inner={AllReduce()!r}, site_codec=Identity())"


def test_errors_of_others_are_forgotten_when_the_owners_take_over() -> None:
    def run(groups: Groups, late: tuple[bool, ...]) -> tuple[Tensor, State]:
        exchange = Hierarchical(EXCHANGES["4 bits, feedback"])
        groups.begin(0, late[0])
        state, x_N = exchange.init(torch.zeros(4096), groups.as_of(late[0])), torch.empty(0)
        for step, each in enumerate(late):
            groups.begin(0, each)
            x_N = payload(4096, groups.rank, step)
            exchange.run(x_N, state, groups, step)
        return x_N, state

    usual, mixed = (
        run_threads(6, run, late, nodes=THREE_BY_TWO, hierarchical=True)
        for late in ((False, False, False), (True, False, False))
    )
    for (x_N, state), (y_N, other) in zip(usual, mixed, strict=True):
        assert torch.equal(x_N, y_N) and torch.equal(state["chunk_residual"], other["chunk_residual"])


def test_leaders_look_at_their_column_as_they_will_find_it() -> None:
    def look(groups: Groups) -> tuple[bool, bool | None, bool]:
        seen = groups.as_of(True)
        return seen.column is seen.inter, seen.column and seen.column.gathers, groups.world.gathers

    found = run_threads(6, look, nodes=THREE_BY_TWO, hierarchical=True)
    assert found == [(True, True, False), (False, True, False)] * 3


def test_sums_in_16_bits_do_not_overflow() -> None:
    def run(groups: Groups) -> Tensor:
        x_N = torch.full((100,), 50000.0, dtype=torch.float16)
        Hierarchical(AllReduce()).run(x_N, {}, groups, 0)
        return x_N

    # Nodes of unlike size count more or less than the mean one, so 60000 would overflow in the second layout.
    for nodes in (THREE_BY_TWO, UNEVEN_HOSTS, [0, 0, 1, 1]):
        for x_N in run_threads(len(nodes), run, nodes=nodes, hierarchical=True):
            torch.testing.assert_close(x_N, torch.full_like(x_N, 50000.0), rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    "exchange", [Gossip(topologies.get("ring")), PowerSGD(((20, 20),))], ids=["gossip", "low rank"]
)
def test_the_first_hosts_exchange_what_is_not_elementwise_or_complete(exchange: Exchange) -> None:
    def run(groups: Groups) -> tuple[Tensor, bool]:
        x_N = payload(400, groups.rank, 0)
        wrapped = Hierarchical(exchange)
        state = wrapped.init(x_N, groups)
        wrapped.run(x_N, state, groups, 0)
        return x_N, wrapped.shares(groups)

    sums = [site_sum(400, 0, site, TWO_BY_THREE, exchange) for site in "ab"]  # for gossip it is the mean of a site
    expected = run_threads(2, among_sites, exchange, [sums], nodes=range(2))
    found = run_threads(6, run, nodes=TWO_BY_THREE, hierarchical=True)
    assert not any(shares for _, shares in found)
    for node, (x_N, _) in zip(TWO_BY_THREE, found, strict=True):
        assert torch.equal(x_N, expected["ab".index(node[0])][0])


def test_errors_of_a_range_are_those_of_its_part_of_the_share() -> None:
    def look(groups: Groups) -> tuple[list[int], list[int], list[int]]:
        exchange = Hierarchical(EXCHANGES["4 bits, feedback"])
        state = exchange.init(torch.zeros(96), groups)
        state["residual"].copy_(torch.arange(*state["share"].tolist()[:2]))
        state["chunk_residual"].fill_(-1.0)
        seen = exchange.memory(state, 96, 20, 70, groups)
        return state["share"].tolist()[:2], [x.numel() for x in seen], [int(x) for x in seen[0]] if seen else []

    found = run_threads(6, look, nodes=THREE_BY_TWO, hierarchical=True)
    assert [share for share, *_ in found] == [[0, 48], [48, 96]] * 3
    # Chunks have 16 elements: rank 0 owns 0 to 15, its counterparts 16 to 31 and 32 to 47; then 48 to 63, 64 to 79, ...
    assert [sizes for _, sizes, _ in found] == [[28], [22, 16], [28, 12], [22, 6], [28, 16], [22]]
    assert found[0][2] == list(range(20, 48)) and found[1][2] == list(range(48, 70))
