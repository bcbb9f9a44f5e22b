"""`bagua.metrics.report`: passes statistics to sinks every few steps."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Literal

from torch import nn

from bagua.engine import Stats, StepStats, stats
from bagua.engine.distributed_module import add_step_listener, remove_step_listener
from bagua.metrics.choice import as_sinks
from bagua.metrics.sink import Sink

__all__ = ["Report", "report"]

_log = logging.getLogger("bagua")


class Report:
    """A report in progress, returned by `bagua.metrics.report`. As a context manager it closes itself."""

    def __init__(self, module: nn.Module, sinks: Sequence[Sink], every: int, ranks: Collection[int] | None) -> None:
        self._module, self._sinks, self._every, self._ranks = weakref.ref(module), sinks, every, ranks
        self._opened: list[Sink] = []
        self._failed: set[str] = set()  # what has raised and was logged
        self._before: Stats | None = None  # the last snapshot of an engine that another one has replaced
        self._since = stats(module)  # the last one that was reported
        self._closed = False
        if self._reports(self._since):
            try:
                for sink in sinks:
                    self._open(sink, self._since)
            except BaseException:
                self._close_sinks()
                raise
        add_step_listener(module, self)

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def flush(self) -> None:
        """Report the steps since the last report now."""
        module = self._module()
        if not self._closed and module is not None:
            self._guarded("bagua.stats", self._write, module)

    def close(self) -> None:
        """Report the steps since the last report, and stop. A second call has no effect. `bagua.detach` closes too."""
        self.flush()
        if self._closed:
            return
        self._closed = True
        module = self._module()
        if module is not None:
            remove_step_listener(module, self)
        self._close_sinks()

    # -- called by the engine ------------------------------------------------------------------------------------

    def step_ended(self, step: int) -> None:
        """See `StepListener`."""
        if step % self._every == 0:
            self.flush()

    def engine_ends(self, *, replaced: bool) -> None:
        """See `StepListener`."""
        module = self._module()
        if not replaced:
            self.close()
        elif module is not None:
            self.flush()
            self._before = self._counted_on(stats(module))

    # ------------------------------------------------------------------------------------------------------------

    def _reports(self, now: Stats) -> bool:
        return self._ranks is None or now.rank in self._ranks

    def _counted_on(self, now: Stats) -> Stats:
        """`now` with the steps and the cost of earlier engines."""
        if self._before is None:
            return now
        before = self._before
        total = StepStats(
            **{
                field.name: getattr(before.total, field.name) + getattr(now.total, field.name)
                for field in dataclasses.fields(StepStats)
            }
        )
        return dataclasses.replace(now, steps=before.steps + now.steps, total=total)

    def _open(self, sink: Sink, now: Stats) -> None:
        sink.open(now.rank, alone=(now.size if self._ranks is None else len(self._ranks)) == 1)
        self._opened.append(sink)

    def _close_sinks(self) -> None:
        for number, sink in enumerate(self._opened):
            self._guarded(f"closing {number}, {sink!r}", sink.close)
        self._opened.clear()

    def _write(self, module: nn.Module) -> None:
        now = self._counted_on(stats(module))
        if now.steps == self._since.steps:
            return
        since, self._since = self._since, now
        if not self._reports(now):
            return
        for number, sink in enumerate(self._sinks):
            self._guarded(f"sink {number}, {sink!r}", self._write_to, sink, now, since)

    def _write_to(self, sink: Sink, now: Stats, since: Stats) -> None:
        # The members may have changed, so that this rank reports from now on.
        if not any(each is sink for each in self._opened):
            self._open(sink, now)
        sink.write(now, since)

    def _guarded(self, what: str, act: Callable[..., Any], *args: Any) -> None:
        """Act; an error is logged once, and does not reach the training loop."""
        try:
            act(*args)
        except Exception as error:
            if what not in self._failed:
                self._failed.add(what)
                _log.warning(
                    "rank %d, metrics, %s: %s: %s; training goes on, and further errors of it are not logged",
                    *(self._since.rank, what, type(error).__name__, error),
                    exc_info=True,
                )


def report(
    module: nn.Module, to: Any, *, every: int = 100, ranks: int | Collection[int] | Literal["all"] = 0
) -> Report:
    """Report a module's statistics to loggers, files and monitoring systems every few steps.

    Sinks get snapshots of `bagua.stats`, of this rank. Nothing is communicated: call it on all ranks, or only on those
    that report. Sinks run in the training thread, between two steps. If one raises, the error is logged once and
    training goes on. The report ends with `close`, with `bagua.detach`, or with the module. After a switch of the
    algorithm `steps` and `total` count on, while those of `bagua.stats` begin again.

    Args:
        module: a distributed module. Load saved state before.
        to: one sink or several: a `SummaryWriter`; a run of Weights & Biases, a logger of Lightning, `mlflow`, or
            another object with `log_metrics` or `log(dict, step=)`; the path of a .csv file; an OpenTelemetry
            `MeterProvider`; a `bagua.metrics.Sink`; or a function that takes a `bagua.Stats`.
        every: steps between two snapshots. Reported are the steps that it divides, and the last one.
        ranks: which ranks report: a rank, several, or "all". On other ranks sinks are not opened. If ranks are lost
            or join, the present numbering counts.

    Returns:
        A `Report`, to close it.

    Raises:
        ValueError: `module` is not distributed, `every` is less than 1, or no rank is named.
        TypeError: an object in `to` is no sink.
        OSError, ValueError: a sink cannot be opened.

    Examples:
        >>> seen = []
        >>> with bagua.metrics.report(model, to=[path + ".csv", seen.append], every=1):
        ...     model(inputs).sum().backward()
        ...     optimizer.step()
        >>> seen[0].steps
        2
    """
    now = stats(module)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every: expected a positive number of steps, got {every!r}")
    chosen = _ranks(ranks, now.size)
    sinks = as_sinks(to)
    return Report(module, sinks, every, chosen)


def _ranks(ranks: Any, size: int) -> frozenset[int] | None:
    """Which ranks report; None: all."""
    if isinstance(ranks, str) and ranks == "all":
        return None
    named: list[Any] = list(ranks) if isinstance(ranks, Collection) and not isinstance(ranks, str) else [ranks]
    found = frozenset(rank for rank in named if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0)
    if len(found) != len(named):
        raise ValueError(f'ranks: expected a rank, several different ranks or "all", got {ranks!r}')
    if not any(rank < size for rank in found):
        raise ValueError(f"ranks: {ranks!r} names none of the {size} ranks")
    return found
