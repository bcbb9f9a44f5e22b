"""How many flows: the machine alone, fed with the rates of networks that are made up."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

from bagua.net.driver import LIBRARY

TICK_US = 2000


class Count:
    """FlowCount of the plugin, at most `most` flows."""

    def __init__(self, most: int = 8) -> None:
        self._library = ctypes.CDLL(str(LIBRARY))
        self._library.bagua_net_flow_count_new.restype = ctypes.c_void_p
        self._self = ctypes.c_void_p(self._library.bagua_net_flow_count_new(most))
        self.now_us = 1_000_000_000
        self.sent_bytes = 0.0

    def __del__(self) -> None:
        self._library.bagua_net_flow_count_delete(self._self)

    @property
    def level(self) -> int:
        return self._library.bagua_net_flow_count_level(self._self)

    def tick(self, bytes_per_us: float, sent: int = 0, resent: int = 0, timed_out: bool = False) -> None:
        self.now_us += TICK_US
        acked = int(bytes_per_us * TICK_US)
        self.sent_bytes += acked
        wide = ctypes.c_int64
        self._library.bagua_net_flow_count_add(
            self._self, wide(self.now_us), wide(TICK_US), ctypes.c_uint64(acked), sent, resent, 100, int(timed_out)
        )

    def run(self, seconds: float, rate: Callable[[int], float]) -> list[int]:
        """Levels at each moment on a network that gives `rate(level)` bytes per us."""
        levels = []
        for _ in range(int(seconds * 1e6 / TICK_US)):
            levels.append(self.level)
            self.tick(rate(self.level))
        return levels


def share(levels: list[int], level: int) -> float:
    return levels.count(level) / len(levels)


def test_a_limit_per_flow_takes_all_flows_soon() -> None:
    count = Count()
    levels = count.run(1.5, lambda level: 125.0 * level)
    assert levels[0] == 1 and levels[-1] == 8
    assert share(count.run(60, lambda level: 125.0 * level), 8) > 0.97, "trials of fewer are short and seldom"


def test_a_link_that_one_flow_fills_keeps_one() -> None:
    count = Count()
    assert share(count.run(60, lambda level: 125.0), 1) > 0.97


def test_noise_is_no_gain() -> None:
    chance = random.Random(3)
    count = Count()
    levels = count.run(60, lambda level: 4000.0 * chance.uniform(0.6, 1.4) * (1.0 if level == 1 else 0.8))
    assert share(levels, 1) > 0.9


def test_flows_that_cost_are_given_up() -> None:
    """A core is the limit and more flows cost: also if they once were of use."""
    count = Count()
    count.run(2, lambda level: 125.0 * level)
    assert count.level == 8
    levels = count.run(60, lambda level: 1000.0 / level)
    assert levels[-1] == 1 and share(levels, 1) > 0.6


def test_it_stops_where_the_link_is_full() -> None:
    count = Count()
    levels = count.run(30, lambda level: min(125.0 * level, 500.0))
    assert levels[-1] == 4 and share(levels[1000:], 4) > 0.95


def test_a_slow_second_flow_does_not_hide_the_others() -> None:
    capacity = {1: 187.0, 2: 212.0, 4: 587.0, 8: 1175.0, 16: 1250.0}
    count = Count(16)
    levels = count.run(20, lambda level: capacity[level])
    assert levels[-1] in (8, 16)


def test_a_shallow_queue_that_collapses_keeps_one() -> None:
    """More than one flow: 30 ms as before, then a timeout's silence of 200 ms, whatever is chosen meanwhile."""
    count = Count()
    silent_until = 0
    used_since: int | None = None
    ticks = 20_000
    for _ in range(ticks):
        if count.level == 1:
            used_since = None
        elif used_since is None:
            used_since = count.now_us
        elif count.now_us - used_since > 30_000 and count.now_us > silent_until:
            silent_until = count.now_us + 200_000
            used_since = count.now_us
        silent = count.now_us < silent_until
        count.tick(0.0 if silent else 240.0, 60, 1 if silent else 0)
    assert count.sent_bytes > 0.85 * ticks * TICK_US * 240.0


def test_a_timeout_ends_a_trial() -> None:
    count = Count()
    while count.level == 1:
        count.tick(125.0)
    count.tick(250.0, timed_out=True)
    assert count.level == 1


def test_connections_that_share_a_path_count_time_once() -> None:
    """Two connections sample in turn, each with all of its own time: the rate is their sum."""
    count = Count()
    for index in range(3000):
        count.now_us += 1000 - TICK_US
        count.tick(62.5 * count.level if index >= 0 else 0.0)
    assert count.level == 8


def test_one_flow_stays_one() -> None:
    count = Count(1)
    assert set(count.run(5, lambda level: 100.0)) == {1}
