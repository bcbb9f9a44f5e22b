"""Layers whose output depends on the inputs of all ranks, such as `SyncBatchNorm`."""

from __future__ import annotations

from bagua.nn.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
