"""The log of measurements: CSV, with Bagua 0.9's columns first."""

from __future__ import annotations

import csv
import math
import tempfile
from pathlib import Path

from bagua.autotune.tuner import Measurement

__all__ = ["COLUMNS", "open_log", "write_line"]

# The first four are Bagua 0.9's, in its order.
COLUMNS = (
    "bucket_size_2p",
    "is_hierarchical_reduce",
    "score",
    "train_iter",
    "bucket_bytes",
    "num_lanes",
    "part_bytes",
    "direct_bytes",
    "step_ms",
    "num_steps",
    "phase",
    "used",
    "problem",
)
_GIB = 2**30


def open_log(log: str | bool) -> Path:
    """Make the file, or use one that is there, and return its path; True makes a new one for temporary files.

    Raises:
        ValueError: it cannot be written.
    """
    if log is True:
        with tempfile.NamedTemporaryFile(prefix="bagua_autotune_", suffix=".log", delete=False) as file:
            return Path(file.name)
    path = Path(str(log))
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"autotune: log {str(path)!r} cannot be written: {error}") from error
    return path


def write_line(path: Path, measurement: Measurement, train_iter: int, payload_bytes: int) -> None:
    """Append a line, and the names of the columns before the first.

    `score` is Bagua 0.9's, GiB of buckets a second: more is better. Empty if the settings could not be set up.

    Args:
        train_iter: steps made so far.
        payload_bytes: of all buckets.
    """
    settings, step_s = measurement.settings, measurement.step_s
    values = {
        **settings.as_json(),
        "bucket_size_2p": int(math.log2(settings.bucket_bytes)),
        "is_hierarchical_reduce": settings.hierarchical,
        "score": "" if not step_s else payload_bytes / _GIB / step_s,
        "train_iter": train_iter,
        "step_ms": "" if step_s is None else 1000 * step_s,
        "num_steps": measurement.num_steps,
        "phase": measurement.phase,
        "used": int(measurement.used),
        "problem": measurement.problem,
    }
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        writer.writerow(["" if values[name] is None else values[name] for name in COLUMNS])
