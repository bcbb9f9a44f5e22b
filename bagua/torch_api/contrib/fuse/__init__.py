"""Fused optimizers, under the original's module names."""

from __future__ import annotations

from bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer, is_fused_optimizer

__all__ = ["fuse_optimizer", "is_fused_optimizer"]
