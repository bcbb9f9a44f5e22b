"""Keys are spread evenly, and few of them move when servers join or leave."""

from __future__ import annotations

from collections import Counter

import pytest

from bagua.data.cache.ring import Ring

KEYS = [b"key %d" % i for i in range(20_000)]


@pytest.mark.parametrize("num_servers", [1, 2, 3, 8, 16])
def test_shares_are_even(num_servers: int) -> None:
    ring = Ring([f"10.0.0.{i}:6379/0" for i in range(num_servers)])
    shares = Counter(ring.owner(key) for key in KEYS)
    assert len(shares) == num_servers
    assert 0.75 < min(shares.values()) * num_servers / len(KEYS) <= max(shares.values()) * num_servers / len(KEYS) < 1.3


def test_only_the_share_of_a_server_moves_when_it_leaves_or_joins() -> None:
    names = [f"10.0.0.{i}:6379/0" for i in range(8)]
    before, after = Ring(names), Ring(names[:-1])
    for key in KEYS:
        owner = before.owner(key)
        assert owner == names[-1] or after.owner(key) == owner
    moved = sum(before.owner(key) != after.owner(key) for key in KEYS)
    assert moved / len(KEYS) == pytest.approx(1 / 8, abs=0.04)


def test_the_order_of_servers_is_of_no_consequence() -> None:
    names = ["a", "b", "c"]
    ring, other = Ring(names), Ring(names[::-1])
    assert [ring.owner(key) for key in KEYS] == [other.owner(key) for key in KEYS]
