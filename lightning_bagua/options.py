"""The strategy's arguments: which are the algorithm's, which are the engine's, and which cannot be."""

from __future__ import annotations

from typing import Any

from bagua.algorithms import Algorithm
from bagua.interop.engine_options import split_options

__all__ = ["choose"]

_OF_LIGHTNING = {"module", "optimizers", "process_group"}  # arguments of `bagua.distribute` that Lightning provides
_OF_DDP = {
    "bucket_cap_mb": "use bucket_bytes",
    "check_reduction": "torch has deprecated it",
    "ddp_comm_hook": "choose an algorithm, or use Lightning's DDPStrategy with bagua.interop.ddp_hook()",
    "ddp_comm_state": "choose an algorithm",
    "ddp_comm_wrapper": "choose an algorithm with a codec, bytegrad for one",
    "delay_all_reduce_named_params": "leave it out",
    "device_ids": "use the Trainer's devices",
    "dim": "leave it out",
    "find_unused_parameters": "leave it out, unused parameters are found in every step",
    "init_sync": "leave it out, replicas are always made equal",
    "mixed_precision": "use the Trainer's precision",
    "model_averaging_period": "use algorithm='local_sgd'",
    "output_device": "leave it out",
    "param_to_hook_all_reduce": "leave it out",
    "skip_all_reduce_unused_params": "leave it out",
}


def choose(algorithm: str | Algorithm, flatten: bool, kwargs: dict[str, Any]) -> tuple[Algorithm, dict[str, Any]]:
    """Return the algorithm, with its options, and what else `bagua.distribute` is to be given.

    Raises:
        ValueError, TypeError: an argument is unknown or cannot act; names it.
    """
    if flatten is not True:
        raise ValueError(
            f"flatten: only True is supported, got {flatten!r}; gradients are always exchanged in flat buckets"
        )
    for name in kwargs:
        if name in _OF_DDP:
            raise TypeError(f"{name}: an argument of DistributedDataParallel that Bagua does not have; {_OF_DDP[name]}")
        if name in _OF_LIGHTNING:
            raise TypeError(f"{name}: Lightning provides it")
    return split_options(algorithm, kwargs)
