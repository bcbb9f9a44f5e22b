"""What `bagua.explain` returns: measurements, predictions and the reason of a choice."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn

from bagua.auto.links import Links
from bagua.engine.distributed_module import attachment_of

__all__ = ["Explanation", "Row", "describe_rate", "explain"]


@dataclass(frozen=True)
class Row:
    """A setting that was considered.

    Attributes:
        name: algorithm with options, as for `bagua plan`.
        kind: class: "exact", "lossy", "periodic", "decentralized" or "asynchronous".
        predicted_s: seconds of a step by the plan's simulation; None where it cannot tell.
        measured_s: seconds of a step on the slowest rank; None if it was not tried.
        loss_gap: by which it learns worse than DDP, as a fraction of the loss; None if that was not measured with
            this family of optimizers. Of settings that differ in bits or rank alone, at most that of a coarser one.
        verdict: what became of it.
    """

    name: str
    kind: str
    predicted_s: float | None = None
    measured_s: float | None = None
    loss_gap: float | None = None
    verdict: str = ""


@dataclass(frozen=True)
class Explanation:
    """The choice of `algorithm="auto"`. `str()` is a table for people.

    Attributes:
        phase: "waiting" for the first step, "measuring" steps in full precision, "trying" the best settings,
            "settled".
        chosen: what trains now, as for `bagua plan`.
        reason: one sentence.
        step: training step after which this was decided.
        allow: the class that was allowed.
        size: ranks.
        compute_s: seconds of a step without communication, on the slowest rank.
        exposed_s: seconds of a step in full precision in which training waited for communication.
        links: as measured; None before that.
        rows: all settings of the class, and those that need an optimizer of their own.
    """

    phase: str
    chosen: str
    reason: str
    step: int
    allow: str
    size: int
    compute_s: float | None = None
    exposed_s: float | None = None
    links: Links | None = None
    rows: tuple[Row, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `json.dumps`."""
        return {
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "links": None if self.links is None else self.links.as_dict(),
            "rows": [asdict(each) for each in self.rows],
        }

    def as_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Any) -> Explanation:
        """The inverse of `as_dict`.

        Raises:
            ValueError: it is not one.
        """
        try:
            links = data["links"]
            return cls(
                **{
                    **{each.name: data[each.name] for each in fields(cls)},
                    "links": None if links is None else Links.from_dict(links),
                    "rows": tuple(Row(**each) for each in data["rows"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"explanation: {error!r} in what was saved") from error

    def __str__(self) -> str:
        lines = [f'auto (allow="{self.allow}"): {self.chosen}', self.reason]
        if self.links is not None:
            lines.append(
                f"links: {describe_rate(self.links.bandwidth)}, {1e3 * self.links.latency_s:.2f} ms one way, ways "
                f"differ by {self.links.asymmetry:.2f} at most; measured in {self.links.seconds:.1f} s"
            )
        if self.compute_s is not None and self.exposed_s is not None:
            lines.append(
                f"a step in full precision: {1e3 * self.compute_s:.1f} ms without communication, and "
                f"{1e3 * self.exposed_s:.1f} ms waiting for it"
            )
        if self.rows:
            heads = ("setting", "class", "predicted", "measured", "loss gap", "")
            cells = [heads, *((r.name, r.kind, _ms(r.predicted_s), _ms(r.measured_s), _percent(r.loss_gap), r.verdict)
                              for r in self.rows)]  # fmt: skip
            widths = [max(len(row[column]) for row in cells) for column in range(5)]
            lines += [
                "  ".join(
                    cell.ljust(width) if column < 2 else cell.rjust(width)
                    for column, (cell, width) in enumerate(zip(row, (*widths, 0), strict=True))
                ).rstrip()
                for row in cells
            ]
        return "\n".join(lines)


def explain(module: nn.Module) -> Explanation:
    """Return what `algorithm="auto"` has measured, predicted and chosen, and why; the same on all ranks.

    Raises:
        ValueError: `module` is not distributed, or an algorithm was named for it.

    Examples:
        >>> try:
        ...     print(bagua.explain(model))
        ... except ValueError as error:
        ...     print(error)
        module: Linear is distributed with an algorithm that was named, not "auto"
    """
    chooser = attachment_of(module).engine.tracker.chooser
    if chooser is None:
        raise ValueError(f'module: {type(module).__name__} is distributed with an algorithm that was named, not "auto"')
    return chooser.explanation


def describe_rate(bits_per_s: float) -> str:
    """For people."""
    return f"{bits_per_s / 1e9:.2f} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.0f} Mbit/s"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _percent(fraction: float | None) -> str:
    return "?" if fraction is None else f"{100 * fraction:.1f} %"
