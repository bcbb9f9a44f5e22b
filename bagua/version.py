"""The version of this package, under the original's name: `bagua.version.__version__`."""

from __future__ import annotations

import bagua

__all__ = ["__version__"]

__version__ = str(bagua.__version__)
