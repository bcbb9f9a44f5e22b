"""Bagua's exchanges inside torch's own wrappers, `DistributedDataParallel` and FSDP2, and Hugging Face's loops.

`bagua.interop.transformers` and `bagua.interop.accelerate` are imported at their first use: they need these packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bagua.interop.ddp import DDPHook, ddp_hook
from bagua.interop.fsdp import CompressedFSDP, compress_fsdp

__all__ = ["CompressedFSDP", "DDPHook", "compress_fsdp", "ddp_hook"]

if TYPE_CHECKING:
    from bagua.interop import accelerate as accelerate
    from bagua.interop import transformers as transformers
else:

    def __getattr__(name: str) -> Any:
        if name in ("accelerate", "transformers"):
            return import_module(f"bagua.interop.{name}")
        raise AttributeError(f"module 'bagua.interop' has no attribute {name!r}")
