"""Options of autotuning: arguments of `bagua.distribute`, or the launcher's environment."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from bagua.autotune.strategies import STRATEGIES

__all__ = ["Autotune", "as_options", "from_environment"]

LEVEL = "BAGUA_AUTOTUNE"
_PREFIX = "BAGUA_AUTOTUNE_"
_LOG = "BAGUA_IS_OUTPUT_AUTOTUNE_LOG"
_YES_NO = {"0": False, "": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True)
class Autotune:
    """Options of autotuning. They must be the same on all ranks.

    Args:
        max_samples: largest number of settings to measure.
        sampling_confidence_time_s: length of a turn, the unit of measurement: as many training steps as fit in this
            time, but at least one.
        warmup_time_s: training time before tuning starts; at least two steps.
        max_turns: largest number of turns, warm-up turns of a setting included.
        search: "neighbours", "halving", "random" or "exhaustive"; see docs/autotuning.md.
        file: JSON file with results, on rank 0. If it has a result for this model, algorithm and set of ranks, all
            ranks use it and measure nothing. Otherwise the new result is added.
        log: CSV file on rank 0 with a line for each measurement; True: a new file in the directory for temporary files.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.

    Examples:
        >>> tune = bagua.Autotune(max_samples=20, search="halving")
        >>> model = bagua.distribute(model, optimizer, "gradient_allreduce", autotune=tune)
        >>> bagua.stats(model).tuning.phase  # no step has been measured yet
        'waiting'
    """

    max_samples: int = 60
    sampling_confidence_time_s: float = 0.1
    warmup_time_s: float = 0.0
    max_turns: int = 56
    search: str = "neighbours"
    file: str | None = None
    log: str | bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_samples", 1), ("max_turns", 16)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"autotune: {name} must be an integer >= {least}, got {value!r}")
        for name in ("sampling_confidence_time_s", "warmup_time_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"autotune: {name} must be a number of seconds >= 0, got {value!r}")
        if self.search not in STRATEGIES:
            raise ValueError(f"autotune: search must be one of {', '.join(STRATEGIES)}, got {self.search!r}")
        if not (self.file is None or (isinstance(self.file, str) and self.file)):
            raise TypeError(f"autotune: file must be a path or None, got {self.file!r}")
        if not isinstance(self.log, bool | str) or self.log == "":
            raise TypeError(f"autotune: log must be a path, True or False, got {self.log!r}")


def as_options(value: Any) -> Autotune | None:
    """Read the argument `autotune` of `bagua.distribute`.

    Args:
        value: None asks the environment; False is off; True takes the defaults; a path is that of the file of results;
            a dict holds arguments of `Autotune`.

    Raises:
        ValueError, TypeError: `value`, or a variable of the environment, is wrong; names it.

    Examples:
        >>> bagua.autotune.as_options({"max_samples": 8}).max_samples
        8
    """
    if value is None:
        return from_environment()
    if isinstance(value, bool):
        return Autotune() if value else None
    if isinstance(value, Autotune):
        return value
    if isinstance(value, str | os.PathLike):
        return Autotune(file=os.fspath(value))
    if isinstance(value, dict):
        unknown = sorted(set(value) - set(Autotune.__dataclass_fields__))
        if unknown:
            known = ", ".join(Autotune.__dataclass_fields__)
            raise ValueError(f"autotune: unknown option {', '.join(map(repr, unknown))}; available: {known}")
        return Autotune(**value)
    raise TypeError(f"autotune: expected a bool, a bagua.Autotune, a dict or a path, got {type(value).__name__}")


def from_environment() -> Autotune | None:
    """Read options from the environment: BAGUA_AUTOTUNE (0 or 1), BAGUA_AUTOTUNE_MAX_SAMPLES, ...; None at level 0.

    Raises:
        ValueError: names the variable that is wrong.
    """
    level = os.environ.get(LEVEL, "0")
    if level not in ("", "0", "1"):
        raise ValueError(f"{LEVEL}: expected 0 or 1, got {level!r}")
    if level != "1":
        return None
    found: dict[str, Any] = {}
    for name, kind in (("MAX_SAMPLES", int), ("SAMPLING_CONFIDENCE_TIME_S", float), ("WARMUP_TIME_S", float)):
        text = os.environ.get(_PREFIX + name)
        if text:
            try:
                found[name.lower()] = kind(text)
            except ValueError:
                raise ValueError(f"{_PREFIX + name}: expected a number, got {text!r}") from None
    text = os.environ.get(_LOG, "0").lower()
    if text not in _YES_NO:
        raise ValueError(f"{_LOG}: expected 0 or 1, got {text!r}")
    return Autotune(**found, log=_YES_NO[text])
