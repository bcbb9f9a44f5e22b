"""Finds the sink for an object that a user passes to `bagua.metrics.report`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bagua.metrics.csv_file import CSVFile
from bagua.metrics.loggers import Logger, TensorBoard, takes_a_dict_and_a_step
from bagua.metrics.open_telemetry import OpenTelemetry
from bagua.metrics.sink import Callback, Sink

__all__ = ["as_sinks"]


def as_sinks(to: Any) -> list[Sink]:
    """The sink for each of the objects, or for one.

    Raises:
        TypeError, ValueError: one is no sink; the message names it.
    """
    many = isinstance(to, Sequence) and not isinstance(to, str | bytes)
    if many and not to:
        raise ValueError("to: expected at least one sink, got none")
    return [_as_sink(each, f"to[{number}]" if many else "to") for number, each in enumerate(to if many else [to])]


def _as_sink(value: Any, name: str) -> Sink:
    if isinstance(value, Sink):
        return value
    if isinstance(value, str | os.PathLike):
        if not os.fspath(value).endswith(".csv"):
            raise ValueError(f"{name}: expected a path that ends in .csv, got {os.fspath(value)!r}")
        return CSVFile(value)
    if not isinstance(value, type):
        if callable(getattr(value, "add_scalar", None)):
            return TensorBoard(value)
        if takes_a_dict_and_a_step(value, "log_metrics") or takes_a_dict_and_a_step(value, "log"):
            return Logger(value)
        if callable(getattr(value, "get_meter", None)):
            return OpenTelemetry(value)
        if callable(value):
            return Callback(value)
    what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    raise TypeError(
        f"{name}: {what} is no sink; pass a bagua.metrics.Sink, a function of bagua.Stats, the path of a .csv file, "
        "an OpenTelemetry MeterProvider, or a logger with add_scalar(), log_metrics() or log(dict, step=)"
    )
