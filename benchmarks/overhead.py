"""What the engine costs: `python -m benchmarks.overhead`, the same as `bagua bench overhead`."""

from __future__ import annotations

import sys

from bagua.bench.machine import describe_machine
from bagua.bench.overhead import Block, Case, Result, compare, main, make_model, summarise, table

__all__ = ["Block", "Case", "Result", "compare", "describe_machine", "main", "make_model", "summarise", "table"]

if __name__ == "__main__":
    sys.exit(main())
