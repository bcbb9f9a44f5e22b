"""Description of the machine for results files."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe_machine", "now"]


def describe_machine() -> dict[str, Any]:
    """Processor, cores, load and versions."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def now() -> str:
    """The date and time, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
