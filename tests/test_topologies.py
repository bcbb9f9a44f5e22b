"""Every topology mixes without bias, and over a period connects all ranks."""

from __future__ import annotations

import pytest

from bagua import topologies

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16]


@pytest.mark.parametrize("name", topologies.available())
@pytest.mark.parametrize("size", SIZES)
def test_doubly_stochastic_and_connected(name: str, size: int) -> None:
    topology = topologies.get(name)
    period = topology.period(size)
    reached = [{rank} for rank in range(size)]
    for step in range(period):
        matrix = topology.matrix(size, step)
        assert matrix == topology.matrix(size, step + period)
        for line in (*matrix, *zip(*matrix, strict=True)):
            assert sum(line) == pytest.approx(1.0) and min(line) >= 0
        for rank in range(size):
            peers = topology.peers(rank, size, step)
            assert len({peer for peer, _ in peers}) == len(peers) and rank not in {peer for peer, _ in peers}
            for peer, weight in peers:
                assert 0 < weight <= 1 and rank in topology.receivers(peer, size, step)
    for _ in range(size):  # what a rank knows after several periods
        for step in range(period):
            reached = [
                set.union(reached[rank], *(reached[peer] for peer, _ in topology.peers(rank, size, step)))
                for rank in range(size)
            ]
    assert all(known == set(range(size)) for known in reached)


@pytest.mark.parametrize("size", SIZES)
def test_fixed_means_fixed(size: int) -> None:
    for name in topologies.available():
        topology = topologies.get(name)
        if topology.fixed:
            assert all(topology.peers(r, size, 0) == topology.peers(r, size, s) for r in range(size) for s in range(9))


@pytest.mark.parametrize("size", SIZES)
def test_shift_one_pairs(size: int) -> None:
    """Partners agree; an even number leaves nobody out, an odd one a single rank, each in its turn."""
    topology = topologies.get("shift_one")
    resting = []
    for step in range(topology.period(size)):
        partner = {rank: topology.peers(rank, size, step) for rank in range(size)}
        for rank, peers in partner.items():
            if peers:
                ((peer, weight),) = peers
                assert weight == 0.5 and partner[peer][0][0] == rank
            else:
                resting.append(rank)
    if size > 1:
        assert sorted(resting) == (list(range(size)) if size % 2 else [])


@pytest.mark.parametrize("size", [2, 4, 6, 8, 16])
def test_shift_one_is_the_originals(size: int) -> None:
    for step in range(2 * size):
        for rank in range(size):
            half = size // 2
            want = (step + rank) % ((size + 1) // 2) + half if rank < half else (rank - half - step) % half
            assert topologies.get("shift_one").peers(rank, size, step) == ((want, 0.5),)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_exponential_gives_the_exact_mean(size: int) -> None:
    topology = topologies.get("exponential")
    values = [float(3**rank) for rank in range(size)]
    mean = sum(values) / size
    for step in range(topology.period(size)):
        matrix = topology.matrix(size, step)
        values = [sum(w * v for w, v in zip(row, values, strict=True)) for row in matrix]
    assert values == pytest.approx([mean] * size)


def test_a_ring_of_two_gives_the_exact_mean() -> None:
    assert topologies.get("ring").matrix(2, 0) == [[0.5, 0.5], [0.5, 0.5]]


def test_registry() -> None:
    ring = topologies.get("ring")
    assert topologies.get(ring) is ring and ring == topologies.Ring() and repr(ring) == "Ring()"
    with pytest.raises(ValueError, match="'torus'.*complete"):
        topologies.get("torus")
    with pytest.raises(TypeError, match="int"):
        topologies.get(3)  # type: ignore

    class Other(topologies.Ring):
        """Same name, other class."""

    with pytest.raises(ValueError, match="'ring' is already registered"):
        topologies.register(Other)
