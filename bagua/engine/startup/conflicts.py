"""Conflict checks: other engines, torch's wrappers, sharded optimizers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from torch import nn

from bagua.engine.hooks import attachments
from bagua.engine.startup.inventory import Inventory
from bagua.engine.torch_wrappers import INSTEAD, torch_wrapper

__all__ = ["check_shared", "check_wrapped"]


def check_shared(module: nn.Module, inventory: Inventory) -> None:
    """Check that no parameter is trained by two engines: both would reduce its gradient.

    Raises:
        ValueError: another distributed module trains one of the parameters; names both modules and the parameter.
    """
    if next(_shared(module, inventory), None) is None:
        return
    gc.collect()  # the other module may have been dropped, within a reference cycle
    found = next(_shared(module, inventory), None)
    if found is not None:
        name, other, other_name = found
        raise ValueError(
            f"module: parameter {name!r} of {type(module).__name__} is parameter {other_name!r} of "
            f"{_describe(other, module)}, which is already distributed; a parameter can belong to one distributed "
            "module only. Distribute one module that contains both, or call bagua.detach() on the other one first"
        )


def _shared(module: nn.Module, inventory: Inventory) -> Iterator[tuple[str, nn.Module, str]]:
    """Name here, the other module, name there, of trainable parameters."""
    ours = {id(param): name for name, param in inventory.parameters.items()}
    for other, attachment in attachments.pairs():
        if other is not module:
            for name, param in attachment.engine.inventory.parameters.items():
                if id(param) in ours:
                    yield ours[id(param)], other, name


def _describe(other: nn.Module, module: nn.Module) -> str:
    inside = next((name for name, part in module.named_modules() if part is other), None)
    around = next((name for name, part in other.named_modules() if part is module), None)
    if inside is not None:
        return f"its own submodule {inside!r} ({type(other).__name__})"
    if around is not None:
        return f"{type(other).__name__}, of which it is submodule {around!r}"
    return f"another module ({type(other).__name__})"


def check_wrapped(module: object) -> None:
    """Refuse a module whose gradients torch already reduces.

    Raises:
        ValueError: it is or holds a DistributedDataParallel or FullyShardedDataParallel, or was given to `replicate()`
            or `fully_shard()`.
    """
    for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
        wrapper = torch_wrapper(part)
        if wrapper is not None:
            where = f"its part {name!r}" if name else "it"
            raise ValueError(f"module: {where} {wrapper}, which exchanges gradients itself; {INSTEAD}")
