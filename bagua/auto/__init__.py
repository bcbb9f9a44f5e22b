"""Auto: measures links and steps, and chooses the algorithm. `bagua.engine` begins a session by name."""

from __future__ import annotations

from bagua.auto.explanation import Explanation, Row, explain
from bagua.auto.links import Link, Links

__all__ = ["Explanation", "Link", "Links", "Row", "explain"]
