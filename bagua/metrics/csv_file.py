"""Sink for a CSV file."""

from __future__ import annotations

import csv
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from bagua.engine import Stats
from bagua.metrics.catalogue import METRICS, scalars
from bagua.metrics.sink import Sink

__all__ = ["COLUMNS", "CSVFile"]

#: `time` is in seconds since 1970 (UTC); `extra` is JSON: what the algorithm reports.
COLUMNS = ("time", "rank", "algorithm", *(key for metric in METRICS for key in metric.keys), "extra")


class CSVFile(Sink):
    """Appends a row for each snapshot, and flushes it.

    Args:
        path: of the file. `{rank}` stands for the rank, and is required if several ranks report. Folders are created.

    Raises:
        ValueError: when the report begins: the file exists and has other columns, or `{rank}` is missing.
        OSError: when the report begins: the file cannot be written.

    Examples:
        >>> import csv
        >>> with bagua.metrics.report(model, to=bagua.metrics.CSVFile(path), every=1):
        ...     model(inputs).sum().backward()
        ...     optimizer.step()
        >>> [row["steps"] for row in csv.DictReader(open(path))]
        ['2']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._pattern = os.fspath(path)
        self._file: TextIO | None = None
        self._writer: Any = None

    def __repr__(self) -> str:
        return f"CSVFile({self._pattern!r})"

    def open(self, rank: int, *, alone: bool) -> None:
        """See `Sink`."""
        if not alone and "{rank}" not in self._pattern:
            raise ValueError(f"{self._pattern}: several ranks report; put {{rank}} into the path")
        path = Path(self._pattern.replace("{rank}", str(rank)))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="")
        self._file.seek(0)
        header = next(csv.reader(self._file), None)
        if header is None:
            self._writer.writeheader()
            self._file.flush()
        elif tuple(header) != COLUMNS:
            self.close()
            raise ValueError(f"{path}: exists and has other columns; remove it or choose another path")

    def write(self, stats: Stats, since: Stats) -> None:
        """See `Sink`."""
        assert self._file is not None, "open() comes first"
        row: dict[str, Any] = {key: value for key, value in scalars(stats, since).items() if key in COLUMNS}
        extra = {name: series.last for name, series in stats.extra.items()}
        row |= {"time": f"{time.time():.3f}", "rank": stats.rank, "algorithm": stats.algorithm}
        row |= {"extra": json.dumps(extra) if extra else ""}
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        """See `Sink`."""
        if self._file is not None:
            self._file.close()
            self._file = None
