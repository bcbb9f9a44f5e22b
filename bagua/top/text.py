"""A picture of a job as lines of text."""

from __future__ import annotations

import time

from bagua.top.picture import Event, Picture, Rank

__all__ = ["lines_of"]

_EVENTS = 8
_COLUMNS = ("rank", "host", "pid", "steps", "steps/s", "exposed", "sent", "sent/s", "received/s", "")


def lines_of(picture: Picture) -> list[str]:
    """Header, a line for each rank, and the newest changes of the members."""
    trains = [rank for rank in picture.ranks if rank.rank is not None]
    kind = f"fault-tolerant, epoch {picture.epoch}" if picture.fault_tolerant else "not fault-tolerant"
    algorithms = ", ".join(sorted({rank.algorithm for rank in trains})) or "no module is distributed yet"
    hosts = "1 host" if len(picture.hosts) == 1 else f"{len(picture.hosts)} hosts"
    ranks = "1 rank" if len(trains) == 1 else f"{len(trains)} ranks"
    lines = [f"job {picture.job} ({kind}): {ranks} on {hosts}, {algorithms}"]
    if picture.ranks:
        lines += ["", *_table([_COLUMNS, *map(_cells, picture.ranks)])]
    lines += [f"host {name} does not answer: {why}" for name, why in picture.missing.items()]
    if picture.events:
        lines += ["", "changes of the members", *map(_event, picture.events[-_EVENTS:])]
    return lines


def _cells(rank: Rank) -> tuple[str, ...]:
    if rank.rank is None:
        return ("-", rank.host, str(rank.pid), *[""] * 6, rank.problem or "not distributed yet")
    state = rank.problem or (f"stalled {rank.stalled_s:.1f} s" if rank.stalled_s else "")
    if not state and rank.restarts:
        state = f"started again: {rank.restarts}"
    return (
        str(rank.rank),
        rank.host,
        str(rank.pid),
        str(rank.steps),
        "" if rank.steps_per_s is None else f"{rank.steps_per_s:.2f}",
        "" if rank.exposed is None else f"{100 * rank.exposed:.0f} %",
        _bytes(rank.bytes_sent),
        "" if rank.sent_per_s is None else _bytes(rank.sent_per_s),
        "" if rank.received_per_s is None else _bytes(rank.received_per_s),
        state,
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {1, len(widths) - 1}
    return [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _event(event: Event) -> str:
    stall = f"; stalled {event.stalled_s:.2f} s" if event.epoch is not None else ""
    lost = ", one step dropped" if event.skipped else ""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {event.text}{stall}{lost}"
