"""Checkpoints: written atomically, and resumed with the same bits."""

from __future__ import annotations

from bagua.checkpoint.archive import Loaded, load, save, steps
from bagua.checkpoint.errors import CheckpointError
from bagua.checkpoint.original import load_checkpoint, save_checkpoint
from bagua.checkpoint.shards import Shards

__all__ = ["CheckpointError", "Loaded", "Shards", "load", "load_checkpoint", "save", "save_checkpoint", "steps"]
