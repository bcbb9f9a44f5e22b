"""`bagua bench tradeoff --held-out`: models and links drawn from a seed, on which no default was tuned.

The same seed draws the same conditions on every machine. A link without latency or loss is measured over the
relay and over the kernel's token buckets, two emulators that share no code. The bytes on the wire are compared with
formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from typing import Any

from bagua.bench import conditions, tradeoff
from bagua.bench.conditions import Condition
from bagua.bench.drawn_models import KINDS
from bagua.bench.held_out_tables import KIND, check_bytes
from bagua.bench.tradeoff import Plan

__all__ = ["CONTENDERS", "QUICK_CONTENDERS", "Drawn", "draw", "plans_of", "run"]

CONTENDERS = "ddp,gradient_allreduce,bytegrad,int4,qadam_1bit,low_precision_decentralized"
QUICK_CONTENDERS = "ddp,gradient_allreduce,bytegrad,int4"
_NUM, _QUICK_NUM = 10, 3
_HOSTS = (2, 3, 4, 4, 6, 8, 12, 16)
_QUICK_HOSTS = (2, 3, 4)
_SLOWEST, _FASTEST = 100e6, 10e9  # bit/s
_LONGEST_S = 0.05  # of a latency, one way
_LEAST_LOSS, _MOST_LOSS = 1e-4, 1e-2
_LEAST_ELEMENTS, _MOST_ELEMENTS, _QUICK_ELEMENTS = 200_000, 20_000_000, 5_000_000
_TRANSFER_S, _QUICK_TRANSFER_S = (0.2, 3.0), (0.1, 0.6)  # of all gradients in fp32


@dataclass(frozen=True)
class Drawn:
    """One condition.

    Attributes:
        condition: the link, the same for all hosts.
        hosts: how many, one rank each.
        model: name of the model.
        compute_ms: forward and backward together.
    """

    condition: Condition
    hosts: int
    model: str
    compute_ms: float


def draw(seed: int, quick: bool = False) -> tuple[Drawn, ...]:
    """Draw conditions: 10, or 3 if `quick`; those that two wires can emulate appear twice.

    The first has neither latency nor loss.

    Raises:
        ValueError: `seed` is negative.
    """
    if seed < 0:
        raise ValueError(f"--seed: expected an integer >= 0, got {seed}")
    kinds, found = tuple(KINDS), []
    first = int(Random(seed).random() * len(kinds))
    for index in range(_QUICK_NUM if quick else _NUM):
        found += _one(Random(seed * 1000 + index), kinds[(first + index) % len(kinds)], index == 0, quick)
    return tuple(found)


# Only `Random.random()` is used: it is the one method whose sequence Python promises to keep.
def _one(draws: Random, kind: str, plain: bool, quick: bool) -> list[Drawn]:
    megabits = round(_between_logs(draws, _SLOWEST, _FASTEST) / 1e6)
    delayed, lossy = draws.random() < 0.8 and not plain, draws.random() < 0.3 and not plain
    micros = round(1e6 * _LONGEST_S * draws.random() ** 2) if delayed else 0
    loss = _between_logs(draws, _LEAST_LOSS, _MOST_LOSS) if lossy else 0.0
    among = _QUICK_HOSTS if quick else _HOSTS
    hosts = among[int(draws.random() * len(among))]
    seconds = _between_logs(draws, *(_QUICK_TRANSFER_S if quick else _TRANSFER_S))
    elements = seconds * megabits * 1e6 / (64 * (hosts - 1) / hosts)
    most = (_QUICK_ELEMENTS if quick else _MOST_ELEMENTS) / max(1, hosts / 4)
    numel = round(min(max(elements, _LEAST_ELEMENTS), most))
    model = f"{kind}@{int(draws.random() * 10**6)}/{numel}"
    compute_ms = round(50 + 250 * draws.random())
    name = f"{megabits}mbit/{micros}us" + (f"/loss{loss:.5f}" if loss else "")
    wires = ("tbf", "relay") if not micros and not loss else ("relay",)
    return [Drawn(conditions.parse(f"{name}/wire{wire}"), hosts, model, compute_ms) for wire in wires]


def _between_logs(draws: Random, low: float, high: float) -> float:
    return math.exp(math.log(low) + (math.log(high) - math.log(low)) * draws.random())


def plans_of(drawn: Sequence[Drawn], names: tuple[str, ...], steps: int, budget_s: float, again: int) -> list[Plan]:
    """One plan for each condition."""
    return [
        Plan(
            conditions=(each.condition,),
            contenders=names,
            hosts=each.hosts,
            model=each.model,
            compute_ms=each.compute_ms,
            forward_share=1 / 3,
            steps=steps,
            budget_s=budget_s,
            emulated=True,
            again=again,
        )
        for each in drawn
    ]


def run(
    seed: int,
    quick: bool,
    plans: Sequence[Plan],
    told: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Run all plans; `keep` is called with the report, as far as it goes, after each condition."""
    told(f"{len(plans)} conditions drawn with seed {seed}{', quick form' if quick else ''}")
    rows: list[dict[str, Any]] = []
    for number, plan in enumerate(plans, 1):
        told(f"\ncondition {number} of {len(plans)}: {plan.hosts} hosts, {plan.model}, {plan.compute_ms:g} ms")
        tradeoff.run(plan, None, told, partial(_join, seed, quick, plans, rows, keep))
    told("\n" + check_bytes(rows))


def _join(
    seed: int,
    quick: bool,
    plans: Sequence[Plan],
    rows: list[dict[str, Any]],
    keep: Callable[[dict[str, Any]], None],
    report: dict[str, Any],
) -> None:
    rows += report["rows"]
    chosen = [
        Drawn(condition, plan.hosts, plan.model, plan.compute_ms) for plan in plans for condition in plan.conditions
    ]
    drawn = [{**asdict(each), "condition": each.condition.name} for each in chosen]
    settings = {"seed": seed, "quick": quick, "drawn": drawn, "entrants": list(plans[0].contenders)}
    shared = {key: report[key] for key in ("date", "bagua", "machine", "left_out")}
    keep({"kind": KIND, **shared, "settings": settings, "rows": list(rows)})
