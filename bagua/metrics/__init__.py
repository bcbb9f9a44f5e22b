"""Metrics: statistics of training for TensorBoard, experiment loggers, CSV, OpenTelemetry and Prometheus.

Nothing is reported unless `report` is called.
"""

from __future__ import annotations

from bagua.metrics.catalogue import scalars
from bagua.metrics.csv_file import CSVFile
from bagua.metrics.loggers import Logger, TensorBoard
from bagua.metrics.open_telemetry import OpenTelemetry
from bagua.metrics.prometheus import Prometheus
from bagua.metrics.reporting import Report, report
from bagua.metrics.sink import Sink

__all__ = [
    "CSVFile",
    "Logger",
    "OpenTelemetry",
    "Prometheus",
    "Report",
    "Sink",
    "TensorBoard",
    "report",
    "scalars",
]
