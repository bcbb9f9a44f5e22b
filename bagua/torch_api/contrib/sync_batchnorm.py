"""`bagua.nn.SyncBatchNorm` under the original's module name; on CPUs too."""

from __future__ import annotations

import bagua

__all__ = ["SyncBatchNorm"]

SyncBatchNorm = bagua.nn.SyncBatchNorm
