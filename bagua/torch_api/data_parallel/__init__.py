"""A wrapper with the interface of torch's `DistributedDataParallel`; an all-reduce that autograd knows."""

from __future__ import annotations

from bagua.torch_api.data_parallel import functional
from bagua.torch_api.data_parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel", "functional"]
