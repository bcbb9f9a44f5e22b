"""The simulation of shared resources gives the times that can be worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from bagua.plan.events import DELAY, Lanes, Resource, Simulation


def test_a_chain_takes_the_sum_and_parallel_delays_the_longest() -> None:
    simulation = Simulation()
    first = simulation.add(DELAY, 2.0)
    one, two = simulation.add(DELAY, 3.0, [first]), simulation.add(DELAY, 5.0, [first])
    last = simulation.add(DELAY, 0.0, [one, two])
    assert simulation.run() == 7.0
    assert (one.begin, one.end, two.end, last.begin) == (2.0, 5.0, 7.0, 7.0)


def test_tasks_share_a_link_evenly() -> None:
    simulation, link = Simulation(), Resource("link", capacity=10.0)
    start = simulation.add(DELAY, 1.0)
    long, late = simulation.add(link, 30.0), simulation.add(link, 10.0, [start])
    simulation.run()
    # 10 units alone in the first second, then 5 a second each until the late one is done.
    assert (late.end, long.end) == (3.0, 4.0)


def test_tasks_take_turns_on_a_link() -> None:
    simulation, link = Simulation(), Resource("link", capacity=10.0, in_turn=True)
    start = simulation.add(DELAY, 1.0)
    long, short = simulation.add(link, 30.0), simulation.add(link, 10.0)
    late = simulation.add(link, 10.0, [start])
    simulation.run()
    assert (long.end, short.end, late.end) == (3.0, 4.0, 5.0)


def test_turns_hide_what_lanes_wait_for() -> None:
    """Two chains of sending and waiting: sharing evenly they send and wait together."""

    def seconds(in_turn: bool) -> float:
        simulation, link = Simulation(), Resource("link", capacity=1.0, in_turn=in_turn)
        for _ in range(2):
            last = simulation.add(DELAY, 0.0)
            for _ in range(4):
                last = simulation.add(DELAY, 1.0, [simulation.add(link, 1.0, [last])])
        return simulation.run()

    assert seconds(in_turn=False) == 12.0
    assert seconds(in_turn=True) == 9.0


def test_a_task_uses_one_core_at_most() -> None:
    simulation, cpu = Simulation(), Resource("CPU", capacity=2.0, each=1.0)
    ends = [simulation.add(cpu, 1.0) for _ in range(4)]
    assert simulation.run() == 2.0
    assert all(task.end == 2.0 for task in ends)
    alone = Simulation()
    alone.add(Resource("CPU", capacity=2.0, each=1.0), 1.0)
    assert alone.run() == 1.0


def test_lanes_are_taken_in_order_and_held_over_a_chain() -> None:
    simulation, lanes = Simulation(), Lanes(1)
    ends = []
    for number in range(3):
        begun = simulation.add(DELAY, 1.0, takes=lanes, name=f"chain {number}")
        ends.append(simulation.add(DELAY, 1.0, [begun], frees=lanes))
    assert simulation.run() == 6.0
    assert [task.end for task in ends] == [2.0, 4.0, 6.0]


def test_resources_without_a_limit_take_no_time() -> None:
    simulation = Simulation()
    simulation.add(Resource("link"), 1e12)
    assert simulation.run() == 0.0


def test_work_is_conserved() -> None:
    """However tasks overlap, a resource that is never idle ends after all its work."""
    chance = random.Random(5)
    simulation, link = Simulation(), Resource("link", capacity=4.0)
    amounts = [chance.uniform(0.1, 9) for _ in range(50)]
    for amount in amounts:
        simulation.add(link, amount)
    assert simulation.run() == pytest.approx(sum(amounts) / 4.0)


def test_what_never_begins_is_an_error() -> None:
    simulation, lanes = Simulation(), Lanes(1)
    simulation.add(DELAY, 1.0, takes=lanes)
    simulation.add(DELAY, 1.0, takes=lanes, name="without a lane")
    with pytest.raises(ValueError, match="never begin: without a lane"):
        simulation.run()


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_amounts_are_checked(amount: float) -> None:
    with pytest.raises(ValueError, match="amount of task 'x'"):
        Simulation().add(DELAY, amount, name="x")


def test_at_least_one_lane() -> None:
    with pytest.raises(ValueError, match="count"):
        Lanes(0)
