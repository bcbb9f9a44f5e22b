"""`save_checkpoint` and `load_checkpoint` of the original."""

from __future__ import annotations

from bagua.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
