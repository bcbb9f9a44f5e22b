"""Sink for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagua import __version__
from bagua.engine import Stats
from bagua.metrics.catalogue import METRICS, Metric
from bagua.metrics.sink import Sink, optional_package

__all__ = ["OpenTelemetry"]


class OpenTelemetry(Sink):
    """Records to the OpenTelemetry meter `bagua`: a counter or gauge `bagua.NAME` for each metric.

    Needs `pip install 'bagua[otel]'`. Points have the attributes `bagua.rank` and `bagua.algorithm`. What an algorithm
    reports is the gauge `bagua.extra`, with the attribute `bagua.extra.name`.

    Args:
        provider: a `MeterProvider`. None: the one that `opentelemetry.metrics.set_meter_provider` has set.
        attributes: further attributes of all points.

    Raises:
        ImportError: opentelemetry-api is not installed.
        TypeError: `provider` is no MeterProvider.

    Examples:
        >>> report = bagua.metrics.report(model, to=bagua.metrics.OpenTelemetry(attributes={"model": "net"}))
        >>> report.close()
    """

    def __init__(self, provider: Any = None, attributes: Mapping[str, str | int | float | bool] | None = None) -> None:
        api = optional_package("opentelemetry.metrics", "otel", "bagua.metrics.OpenTelemetry")
        if provider is None:
            provider = api.get_meter_provider()
        if isinstance(provider, type) or not callable(getattr(provider, "get_meter", None)):
            raise TypeError(f"provider: expected a MeterProvider, got {type(provider).__name__}")
        self._attributes = dict(attributes or {})
        meter = provider.get_meter("bagua", __version__)
        self._instruments: list[tuple[Metric, Any]] = [(metric, _instrument(meter, metric)) for metric in METRICS]
        self._extra = meter.create_gauge("bagua.extra", description="What the algorithm reports.")

    def __repr__(self) -> str:
        return "OpenTelemetry()"

    def write(self, stats: Stats, since: Stats) -> None:
        """See `Sink`."""
        algorithm = ": ".join(each.partition("(")[0] for each in stats.algorithm.split("): "))
        attributes = {**self._attributes, "bagua.rank": stats.rank, "bagua.algorithm": algorithm}
        for metric, instrument in self._instruments:
            value = metric.read(stats)
            if value is None:
                continue
            if metric.counter:
                instrument.add(max(0, value - (metric.read(since) or 0)), attributes)
            else:
                instrument.set(value, attributes)
        for name, series in stats.extra.items():
            self._extra.set(series.last, {**attributes, "bagua.extra.name": name})


def _instrument(meter: Any, metric: Metric) -> Any:
    make = meter.create_counter if metric.counter else meter.create_gauge
    return make(f"bagua.{metric.name}", unit=metric.unit, description=metric.description)
