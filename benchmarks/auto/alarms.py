"""How often noise looks like a change of the links, and how soon a change is seen: `python -m benchmarks.auto.alarms`.

Times of exchanges are played to `bagua.auto.watch.Watch`, looked at as by a session, and to the rule that it replaced.
With a file of `python -m benchmarks.auto --change`, blocks of the steps before the change are played too, in random
order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from bagua.auto.session import LOOK
from bagua.auto.watch import Watch
from bagua.bench import results_file
from bagua.bench.layout import Columns

_BLOCK = 16  # steps of a recording that stay together
_BEFORE, _GIVE_UP = 24, 60  # steps
_FIRST_SEED = 1000  # the rule was tuned on others
Noise = Callable[[random.Random], Iterator[float]]


class Rule(Protocol):
    """What is told the time of exchanges."""

    def add(self, comm_s: float) -> None:
        """Count a step."""
        ...

    @property
    def suspicion(self) -> int:
        """Whether links seem slower, 1, or faster, -1."""
        ...


class Before:
    """The rule until 2026-11-23: all of four steps 1.4 times as slow, or as fast, as the median of the first eight."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=4)

    def add(self, comm_s: float) -> None:
        """Count a step."""
        (self._first if len(self._first) < 8 else self._last).append(comm_s)

    @property
    def suspicion(self) -> int:
        """As that of a watch."""
        if len(self._last) < 4:
            return 0
        typical = statistics.median(self._first)
        return int(min(self._last) > 1.4 * typical) - int(max(self._last) < typical / 1.4)


def independent(spread: float) -> Noise:
    """Log-normal steps."""

    def noise(source: random.Random) -> Iterator[float]:
        while True:
            yield math.exp(source.gauss(0.0, spread))

    return noise


def lingering(spread: float, lasts: float = 0.67) -> Noise:
    """Log-normal steps, of which a share lasts from each to the next."""

    def noise(source: random.Random) -> Iterator[float]:
        value = 0.0
        while True:
            value = lasts * value + source.gauss(0.0, spread * math.sqrt(1 - lasts**2))
            yield math.exp(value)

    return noise


def stalls(spread: float, longest: int, often: float) -> Noise:
    """Some steps, one after the other, take one and a half to four times as long."""

    def noise(source: random.Random) -> Iterator[float]:
        while True:
            if source.random() < often:
                factor = source.uniform(1.5, 4.0)
                for _ in range(source.randint(1, longest)):
                    yield factor * math.exp(source.gauss(0.0, spread))
            yield math.exp(source.gauss(0.0, spread))

    return noise


def recorded(steps: Sequence[float]) -> Noise:
    """Blocks of `steps` in random order."""

    def noise(source: random.Random) -> Iterator[float]:
        while True:
            begin = source.randrange(max(1, len(steps) - _BLOCK + 1))
            yield from steps[begin : begin + _BLOCK]

    return noise


def alarmed(make: Callable[[], Rule], look: int, noise: Noise, trainings: int, steps: int) -> float:
    """Share of trainings with an alarm.

    Args:
        make: the rule.
        look: steps from one look at it to the next.
        noise: times of exchanges, from a source of random numbers.
        trainings: with a seed each.
        steps: of a training.
    """
    found = 0
    for seed in range(_FIRST_SEED, _FIRST_SEED + trainings):
        rule = make()
        for number, seconds in enumerate(itertools.islice(noise(random.Random(seed)), steps), 1):
            rule.add(seconds)
            if number % look == 0 and rule.suspicion:
                found += 1
                break
    return found / trainings


def noticed(make: Callable[[], Rule], look: int, noise: Noise, factor: float, trainings: int) -> list[float]:
    """Steps from a change until it has been read in a sum, of each training, in rising order; infinite after 60.

    Exchanges take `factor` times as long from the 25th step on, or from one of the `look` steps after it.
    """
    found: list[float] = []
    for seed in range(_FIRST_SEED, _FIRST_SEED + trainings):
        rule, before, seen = make(), _BEFORE + seed % look, math.inf
        for number, seconds in enumerate(itertools.islice(noise(random.Random(seed)), before + _GIVE_UP), 1):
            rule.add(seconds * (factor if number > before else 1.0))
            if number > before and number % look == 0 and rule.suspicion:
                seen = number + 1 - before
                break
        found.append(seen)
    return sorted(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto.alarms", description=__doc__)
    parser.add_argument("--recorded", type=Path, help="results of python -m benchmarks.auto --change")
    parser.add_argument("--json", type=Path, help="file for the shares")
    parser.add_argument("--trainings", type=int, default=200, help="default 200")
    parser.add_argument("--steps", type=int, default=250, help="of each; default 250")
    args = parser.parse_args(argv)
    noises: dict[str, Noise] = {
        **{f"independent, {100 * spread:.0f} %": independent(spread) for spread in (0.1, 0.2, 0.3)},
        **{f"lingering, {100 * spread:.0f} %": lingering(spread) for spread in (0.1, 0.15, 0.2)},
        "10 %, single slow steps": stalls(0.1, 1, 0.1),
        "10 %, stalls of 1 to 3 steps": stalls(0.1, 3, 0.05),
    }
    if args.recorded is not None:
        for each in json.loads(args.recorded.read_text())["results"]:
            steps = [step["comm_ms"] for step in each["auto"]["before_change"]]
            noises[f"recorded, {each['condition']}"] = recorded(steps)
    rows: list[dict[str, Any]] = []
    for name, noise in noises.items():
        now = alarmed(Watch, LOOK, noise, args.trainings, args.steps)
        rows.append({"noise": name, "before": alarmed(Before, 4, noise, args.trainings, args.steps), "now": now})
    columns = Columns(("noise", -34), ("before", 8), ("now", 8))
    print(f"share of {args.trainings} trainings of {args.steps} steps that see an alarm")
    print(columns.table([[row["noise"], f"{row['before']:.1%}", f"{row['now']:.1%}"] for row in rows]))
    changes: list[dict[str, Any]] = []
    for factor, spread in itertools.product((1.35, 1.5, 2.0, 1 / 1.5), (0.02, 0.05, 0.08)):
        row: dict[str, Any] = {"factor": round(factor, 2), "noise": spread}
        for name, make, look in (("before", Before, 4), ("now", Watch, LOOK)):
            steps = noticed(make, look, independent(spread), factor, args.trainings)
            row[name] = [
                value if math.isfinite(value) else None for value in (steps[len(steps) * k // 10] for k in (5, 9))
            ]
        changes.append(row)
    columns = Columns(("exchanges", -12), ("noise", 7), ("before", 10), ("9 of 10", 9), ("now", 10), ("9 of 10", 9))
    print("steps until a change is noticed: half of the trainings, and nine of ten")
    print(columns.table([[f"{row['factor']:.2f} x", f"{row['noise']:.0%}", *map(_steps, row["before"] + row["now"])]
                         for row in changes]))  # fmt: skip
    if args.json is not None:
        content = {"trainings": args.trainings, "steps": args.steps, "rows": rows, "changes": changes}
        results_file.write(args.json, content)
    return 0


def _steps(value: float | None) -> str:
    return f"over {_GIVE_UP}" if value is None else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
