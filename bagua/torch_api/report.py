"""Says once, through the log, that an argument cannot act here and why."""

from __future__ import annotations

import logging

__all__ = ["report_once"]

_log = logging.getLogger("bagua")
_said: set[str] = set()


def report_once(what: str) -> None:
    """Log `what` as a warning, the first time in this process."""
    if what not in _said:
        _said.add(what)
        _log.warning("%s", what)
