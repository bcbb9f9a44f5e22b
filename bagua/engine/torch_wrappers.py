"""Recognises modules whose gradients a wrapper of torch reduces: DDP, FSDP, `replicate()` and `fully_shard()`."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["INSTEAD", "refuse_ddp", "torch_wrapper"]

INSTEAD = (
    "use one of the two: distribute the plain module, or keep torch's wrapper and compress what it exchanges with a "
    "hook of bagua.interop or the backend 'bagua'"
)
# By name, because importing FSDP takes a second. The first class that is found counts.
_KINDS = {
    "ReplicateModule": "was given to torch's replicate()",
    "DDP": "was given to torch's replicate()",
    "FSDPModule": "was given to torch's fully_shard()",
    "FullyShardedDataParallel": "is a torch FullyShardedDataParallel",
    "DistributedDataParallel": "is a torch DistributedDataParallel",
}


def torch_wrapper(part: nn.Module) -> str | None:
    """What of torch reduces the gradients of `part`, as the predicate of a sentence; None if nothing does."""
    bases = {each.__name__ for each in type(part).__mro__ if each.__module__.startswith("torch.")}
    return next((what for name, what in _KINDS.items() if name in bases), None)


def refuse_ddp(module: nn.Module) -> None:
    """Refuse a forward pass of `module` that `DistributedDataParallel` calls.

    Raises:
        RuntimeError: DDP would reduce the gradients a second time.
    """
    outer = DistributedDataParallel._get_active_ddp_module()
    if outer is not None and any(each is module for each in outer.modules()):
        raise RuntimeError(
            f"{type(module).__name__} is distributed by Bagua and wrapped in torch's DistributedDataParallel, which "
            f"reduces its gradients again and hides what the algorithm does; {INSTEAD} (Hugging Face Trainer and "
            "Accelerate wrap what they prepare; BaguaTrainer and BaguaAccelerator of bagua.interop do not)"
        )
