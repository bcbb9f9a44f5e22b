"""What is compared with a choice, and how the choice does in the comparison."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "DDP",
    "MOST_OVER_BEST",
    "MOST_OVER_DDP",
    "barred",
    "finalists",
    "joined",
    "line",
    "noticed_after",
    "slowest",
    "summarise",
    "verdict",
]

DDP = "ddp"
MOST_OVER_BEST, MOST_OVER_DDP = 0.10, 0.02
_MOST_STEPS, _MOST_STEPS_AGAIN = 39, 20
_NEAR = 1.4  # of the fastest of a heat: what is slower needs no exact time
_LEAST = 3  # that are timed well, however slow


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """From what each rank saw to what all saw: a step is over when the slowest rank is."""
    return {
        name: [round(max(steps), 3) for steps in zip(*(each[name] for each in ranks), strict=True)] for name in ranks[0]
    }


def joined(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of all ranks as one."""
    first = ranks[0]["auto"]
    steps = slowest([{"auto": each["auto"]["steps_ms"]} for each in ranks])["auto"]
    found = {part: slowest([each[part] for each in ranks]) for part in ("heat", "fixed")}
    return {"auto": {**first, "steps_ms": steps}, **found}


def noticed_after(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """Steps from a change of the links until it was answered by trials or by another setting; None if it was not.

    Examples:
        >>> from benchmarks.auto.judging import noticed_after
        >>> noticed_after([{"phase": "settled", "chosen": "a"}, {"phase": "trying", "chosen": "b"}])
        2
    """
    first = steps[0]["chosen"] if steps else ""
    moved = (number for number, each in enumerate(steps, 1) if each["phase"] != "settled" or each["chosen"] != first)
    return next(moved, None)


def barred(explanation: Mapping[str, Any]) -> set[str]:
    """Settings of the class that learn too badly to be chosen."""
    return {row["name"] for row in explanation["rows"] if row["verdict"].startswith(("learns worse", "loss not"))}


def finalists(heat: Mapping[str, Sequence[float]], chosen: str, allow: str) -> list[str]:
    """Who is timed again after a heat: the choice, what is near the fastest, and DDP if the choice is no faster.

    Examples:
        >>> from benchmarks.auto.judging import finalists
        >>> finalists({"a": [1.0], "b": [1.2], "c": [1.6], "d": [9.0], "ddp": [9.0]}, "b", "lossy")
        ['a', 'b', 'c']
    """
    scores = {name: _typical(steps, allow) for name, steps in heat.items()}
    ranked = sorted((name for name in scores if name != DDP), key=lambda name: scores[name])
    fast = scores[ranked[0]] * _NEAR
    found = {chosen, *ranked[:_LEAST], *(name for name in ranked if scores[name] <= fast)}
    if scores[DDP] <= _NEAR * scores[chosen]:
        found.add(DDP)
    return [name for name in scores if name in found]


def summarise(result: Mapping[str, Any], allow: str) -> dict[str, Any]:
    """The choice beside the best of its class that learns well enough, and beside DDP.

    After a change of the link this is of the second choice.
    """
    auto = result["auto"]
    explanation = auto.get("again", auto["explanation"])
    scores = {name: _typical(steps, allow) for name, steps in {**result["heat"], **result["fixed"]}.items()}
    chosen, best = explanation["chosen"], min((each for each in result["fixed"] if each != DDP), key=scores.__getitem__)
    gaps = {row["name"]: row["loss_gap"] for row in explanation["rows"]}
    row: dict[str, Any] = {
        "condition": result["condition"],
        "chosen": chosen,
        "chosen_ms": scores[chosen],
        "loss_gap": gaps.get(chosen),
        "best": best,
        "best_ms": scores[best],
        "over_best": scores[chosen] / scores[best] - 1,
        "over_ddp": scores[chosen] / scores[DDP] - 1,
        "steps_to_choose": auto["steps_to_choose"],
    }
    if "again" in auto:
        row |= {"before": auto["explanation"]["chosen"], "steps_to_choose_again": auto.get("steps_to_choose_again")}
        row["steps_to_notice"] = noticed_after(auto.get("after_change", ()))
    return row


def verdict(row: Mapping[str, Any], limit: float) -> list[str]:
    """What a summary misses of the targets; empty if nothing.

    Args:
        limit: the largest loss gap of the class.
    """
    missed = []
    if row["over_best"] > MOST_OVER_BEST:
        missed.append(f"{row['over_best']:.0%} slower than {row['best']}")
    if row["over_ddp"] > MOST_OVER_DDP:
        missed.append(f"{row['over_ddp']:.0%} slower than DDP")
    if row["loss_gap"] is None or row["loss_gap"] > limit:
        missed.append("learns worse than the limit")
    if row["steps_to_choose"] > _MOST_STEPS:
        missed.append(f"{row['steps_to_choose']} steps to choose")
    if "before" in row and row["steps_to_choose_again"] is None and row["over_best"] > MOST_OVER_BEST:
        missed.append("no second choice")  # what runs need not change where it is still among the best
    elif "before" in row and (row["steps_to_choose_again"] or 0) > _MOST_STEPS_AGAIN:
        missed.append(f"{row['steps_to_choose_again']} steps to choose again")
    return missed


def line(row: Mapping[str, Any], limit: float) -> str:
    """For people."""
    first = f"{row['condition']}: {row['chosen']} in {row['steps_to_choose']} steps"
    if "before" in row:
        first = f"{row['condition']}: {row['before']}, and no second choice"
        if row["steps_to_choose_again"] is not None:
            first = (
                f"{row['condition']}: {row['before']}, then {row['chosen']} after {row['steps_to_choose_again']} "
                f"steps, {row['steps_to_notice']} of them to notice"
            )
    missed = "; ".join(verdict(row, limit))
    return (
        f"{first}, {row['chosen_ms']:.0f} ms; best {row['best']}, {row['best_ms']:.0f} ms: {row['over_best']:+.1%} of "
        f"it, {row['over_ddp']:+.1%} of DDP{' -- missed: ' + missed if missed else ''}"
    )


def _typical(steps: Sequence[float], allow: str) -> float:
    return statistics.median(steps) if allow in ("exact", "lossy") else statistics.fmean(steps)
