"""Bagua's exchanges inside torch's own wrappers, `DistributedDataParallel` and FSDP2."""

from __future__ import annotations

from bagua.interop.ddp import DDPHook, ddp_hook
from bagua.interop.fsdp import CompressedFSDP, compress_fsdp

__all__ = ["CompressedFSDP", "DDPHook", "compress_fsdp", "ddp_hook"]
