"""Sink for Prometheus, which reads the last snapshot when it scrapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bagua.engine import Stats
from bagua.metrics.catalogue import METRICS
from bagua.metrics.scrape_server import ScrapeServer
from bagua.metrics.sink import Sink, optional_package

__all__ = ["Prometheus"]

_LABEL = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
_UNITS = {"By": "bytes", "s": "seconds"}


class Prometheus(Sink):
    """Keeps the last snapshot for Prometheus: as text, over HTTP, or as a collector in your own registry.

    Needs `pip install 'bagua[prometheus]'`. Metrics are called `bagua_NAME_UNIT`, and have the label `rank`.

    Args:
        port: serve http://address:port/metrics while the report is open; 0 chooses a free port. None: no server.
        address: that the server binds. The default is reachable from this host only. The server has no authentication.
        labels: further labels of all metrics.

    Attributes:
        port: of the server; None if there is none.

    Raises:
        ImportError: prometheus_client is not installed.
        ValueError: `port` or a label is invalid.
        OSError: when the report begins: the port is in use.

    Examples:
        >>> sink = bagua.metrics.Prometheus()
        >>> with bagua.metrics.report(model, to=sink, every=1):
        ...     model(inputs).sum().backward()
        ...     optimizer.step()
        ...     print(sink.text().splitlines()[2])
        bagua_steps_total{rank="0"} 2.0
    """

    def __init__(
        self, port: int | None = None, address: str = "127.0.0.1", labels: Mapping[str, str] | None = None
    ) -> None:
        self._client = optional_package("prometheus_client", "prometheus", "bagua.metrics.Prometheus")
        self._core = optional_package("prometheus_client.core", "prometheus", "bagua.metrics.Prometheus")
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536):
            raise ValueError(f"port: expected a port number or None, got {port!r}")
        self.port = port
        for name in labels or {}:
            if not _LABEL.fullmatch(name) or name in ("rank", "name", "algorithm"):
                raise ValueError(f"labels: {name!r} is not a label name of Prometheus, or is used already")
        self._asked, self._address, self._labels = port, address, {key: str(v) for key, v in (labels or {}).items()}
        self._own_registry = self._client.CollectorRegistry()
        self._last: Stats | None = None  # immutable; a scrape runs in another thread
        self._own_registry.register(self)
        self._server: ScrapeServer | None = None

    def __repr__(self) -> str:
        return f"Prometheus(port={self._asked})"

    def text(self) -> str:
        """Return the last snapshot in Prometheus' text format; empty before the first one."""
        return self._client.generate_latest(self._own_registry).decode()

    def collect(self) -> Iterator[Any]:
        """Yield the last snapshot as metric families: what `prometheus_client.CollectorRegistry.register` expects."""
        if self._last is not None:
            yield from self._families(self._last)

    def describe(self) -> list[Any]:
        """Return no names, so that a registry takes several sinks, which differ in their labels."""
        return []

    def open(self, rank: int, *, alone: bool) -> None:
        """See `Sink`."""
        if self._asked is None:
            return
        try:
            handler = self._client.MetricsHandler.factory(self._own_registry)
            self._server = ScrapeServer(self._address, self._asked, handler)
        except OSError as error:
            raise OSError(
                f"bagua.metrics.Prometheus: cannot serve on {self._address}:{self._asked} (rank {rank}): {error}; "
                "several ranks on one host need a port each"
            ) from error
        self.port = self._server.port

    def write(self, stats: Stats, since: Stats) -> None:
        """See `Sink`."""
        self._last = stats

    def close(self) -> None:
        """See `Sink`."""
        if self._server is not None:
            self._server.close()
            self._server, self.port = None, self._asked

    def _families(self, stats: Stats) -> Iterator[Any]:
        labels = {**self._labels, "rank": str(stats.rank)}
        names, values = list(labels), list(labels.values())
        for metric in METRICS:
            value = metric.read(stats)
            if value is None:
                continue
            kind = self._core.CounterMetricFamily if metric.counter else self._core.GaugeMetricFamily
            unit = _UNITS.get(metric.unit, "")
            family = kind(f"bagua_{metric.key}", metric.description, labels=names, unit=unit)
            family.add_metric(values, value)
            yield family
        if stats.extra:
            extra = self._core.GaugeMetricFamily("bagua_extra", "What the algorithm reports.", labels=[*names, "name"])
            for name, series in stats.extra.items():
                extra.add_metric([*values, name], series.last)
            yield extra
        about = self._core.InfoMetricFamily("bagua_algorithm", "The algorithm with its options.", labels=names)
        about.add_metric(values, {"algorithm": stats.algorithm})
        yield about
