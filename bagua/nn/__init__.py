"""Layers whose result depends on all ranks' inputs."""

from __future__ import annotations

from bagua.nn.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
