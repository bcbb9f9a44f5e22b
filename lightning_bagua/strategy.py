"""Where the original had the class: `from lightning_bagua.strategy import BaguaStrategy`."""

from __future__ import annotations

from lightning_bagua import BaguaStrategy

__all__ = ["BaguaStrategy"]
