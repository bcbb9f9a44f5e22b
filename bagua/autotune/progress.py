"""What `bagua.stats` says of tuning."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.autotune.settings import Settings

__all__ = ["Progress"]


@dataclass(frozen=True)
class Progress:
    """A snapshot.

    Attributes:
        phase: "waiting" (for buckets, or a switch), "warm-up", "search", "final", "done", or "off" where nothing
            can be tuned.
        reason: why it is off, or where settings come from that were not searched.
        settings: in force now.
        tuned: what may differ: names of attributes of `settings`.
        num_samples: settings measured.
        num_steps: training steps made for it.
        default_step_s, best_step_s: seconds a step with the defaults and with the best settings; None while unknown.
        problems: settings that could not be set up, with the reason.
    """

    phase: str
    reason: str
    settings: Settings
    tuned: tuple[str, ...] = ()
    num_samples: int = 0
    num_steps: int = 0
    default_step_s: float | None = None
    best_step_s: float | None = None
    problems: tuple[str, ...] = ()
