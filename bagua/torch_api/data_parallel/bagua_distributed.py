"""The original's `BaguaDistributedDataParallel`, the inside of its wrappers: its name, which says what there is."""

from __future__ import annotations

from bagua.gone import Gone

__all__ = ["BaguaDistributedDataParallel"]

BaguaDistributedDataParallel = Gone(
    "BaguaDistributedDataParallel",
    "module.with_bagua([optimizer], algorithm) or bagua.torch_api.data_parallel.DistributedDataParallel distributes",
)
