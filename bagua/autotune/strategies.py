"""Searches: generators that ask for trials and look at the history of trials for their results.

A search asks for the default first, and ends when it knows no more to try. It may be closed before: the budget is not
its business.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bagua.autotune.settings import Settings
from bagua.autotune.space import Space
from bagua.autotune.trials import Trials

__all__ = ["STRATEGIES", "Strategy", "Trial", "exhaustive", "halving", "neighbours", "random_search"]

_SEED = 0
_BEAM = 4  # settings whose neighbours are looked at, the fastest first
_EARLY = 14  # samples up to which long axes are walked in strides of two
_LONG_AXIS = 5  # values
_FIRST_RUNG, _KEPT = 15, 3


class Trial(NamedTuple):
    """Settings to be measured, and for how many turns more than one unless they turn out to be bad."""

    settings: Settings
    more_turns: int = 1


Strategy = Callable[[Space, Trials], Iterator[Trial]]


def neighbours(space: Space, trials: Trials) -> Iterator[Trial]:
    """Always a neighbour of the fastest settings that has not been tried; of the next fastest if there is none left.

    Step times of exchanges are smooth along an axis (too small: too many messages; too large: no overlap), so that
    the way down from the default passes few bad points. Several of the fastest are kept in view, since one
    measurement may be unlucky.
    """
    yield Trial(space.default)
    while True:
        wide = len(trials.samples) < _EARLY
        found = _untried(space, trials, 2) if wide else None
        if found is None:
            found = _untried(space, trials, 1)
        if found is None:
            return
        yield Trial(found)


def _untried(space: Space, trials: Trials, stride: int) -> Settings | None:
    for sample in trials.ranking()[:_BEAM]:
        for axis, values in space.axes.items():
            line = space.line(sample.settings, axis)
            at, step = line.index(sample.settings), stride if len(values) >= _LONG_AXIS else 1
            for direction in (-1, 1):
                found = _next_of_other_effect(space, line, at, direction * step)
                if found is not None and not trials.known(found):
                    return found
    return None


def _next_of_other_effect(space: Space, line: list[Settings], at: int, step: int) -> Settings | None:
    """The settings on the line, `step` away or a multiple of it, where something changes; the end of the line last."""
    here, end = space.effect(line[at]), len(line) - 1 if step > 0 else 0
    for place in [*range(at + step, end, step), end]:
        if space.effect(line[place]) != here:
            return line[place]
    return None


def halving(space: Space, trials: Trials) -> Iterator[Trial]:
    """Successive halving: many points for a turn each, the best third for twice as many turns, and so on.

    Source: arXiv:1502.07943 (Jamieson and Talwalkar), algorithm 1; a third is kept, not half.
    """
    rung, more = _shuffled(space)[:_FIRST_RUNG], 0
    while len(rung) > 1:
        for settings in rung:
            yield Trial(settings, more)
        rung = sorted(rung, key=trials.score_s)[: len(rung) // _KEPT]
        more = 2 * more + 1


def random_search(space: Space, trials: Trials) -> Iterator[Trial]:
    """Points of the grid in random order."""
    for settings in _shuffled(space):
        yield Trial(settings)


def exhaustive(space: Space, trials: Trials) -> Iterator[Trial]:
    """The whole grid, in its order: to know what there is to be found, if there are turns enough."""
    for settings in space.grid():
        yield Trial(settings)


def _shuffled(space: Space) -> list[Settings]:
    first, *others = space.grid()
    random.Random(_SEED).shuffle(others)
    return [first, *others]


STRATEGIES: dict[str, Strategy] = {
    "neighbours": neighbours,
    "halving": halving,
    "random": random_search,
    "exhaustive": exhaustive,
}
