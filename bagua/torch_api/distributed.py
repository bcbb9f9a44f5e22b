"""`BaguaModule` of the original: what `with_bagua` and its properties are on, which is every module."""

from __future__ import annotations

from torch.nn import Module as BaguaModule

from bagua.torch_api.patch import with_bagua

__all__ = ["BaguaModule", "with_bagua"]
