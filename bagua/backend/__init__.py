"""A backend of `torch.distributed` that compresses large all-reduces and passes everything else on to gloo or NCCL."""

from __future__ import annotations

from bagua.backend.names import Backend
from bagua.backend.process_group import CompressedProcessGroup, Traffic

__all__ = ["Backend", "CompressedProcessGroup", "Traffic"]
