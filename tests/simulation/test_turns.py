"""Ranks that take turns: in rank order, one at a time, and a rank that waits sleeps until it can go on."""

from __future__ import annotations

import threading

import pytest

from bagua.simulation.turns import Deadlock, Turns


def test_a_rank_that_waits_is_woken_once() -> None:
    turns, log = Turns(3), []
    asked: list[int] = []  # threads that asked whether rank 2 can go on

    def main(rank: int) -> None:
        if rank == 2:

            def ready() -> bool:
                asked.append(threading.get_ident())
                return len(log) == 20

            turns.wait_for(2, ready, "the others")
            assert asked.count(threading.get_ident()) == 2, "before it slept, and when it was woken"
            return
        for number in range(10):
            turns.wait_for(rank, lambda number=number: len(log) == 2 * number + rank, "the other one")
            log.append(rank)

    turns.run(main)
    assert log == [0, 1] * 10
    assert len(asked) > 2


def test_all_that_wait_for_nothing_is_an_error() -> None:
    turns, entered = Turns(3), []

    def main(rank: int) -> None:
        entered.append(rank)
        if rank != 1:
            turns.wait_for(rank, lambda: False, "nothing")

    with pytest.raises(Deadlock, match="waits for nothing, and every other rank waits too or has finished"):
        turns.run(main)
    assert entered == [0, 1, 2]


def test_what_ready_raises_reaches_the_rank_that_waits() -> None:
    turns, asked = Turns(2), []

    def ready() -> bool:
        asked.append(threading.get_ident())
        if len(asked) > 1:
            raise ZeroDivisionError("deliberate")
        return False

    def main(rank: int) -> None:
        if rank == 0:
            with pytest.raises(ZeroDivisionError, match="deliberate"):
                turns.wait_for(0, ready, "an answer")
            assert asked[-1] == threading.get_ident()

    turns.run(main)


def test_the_first_exception_ends_all() -> None:
    turns, ended = Turns(3), []

    def main(rank: int) -> None:
        try:
            if rank == 2:
                raise ZeroDivisionError("deliberate")
            turns.wait_for(rank, lambda: False, "nothing")
        finally:
            ended.append(rank)

    with pytest.raises(ZeroDivisionError, match="deliberate"):
        turns.run(main)
    assert sorted(ended) == [0, 1, 2]
