"""The one patch in the project: `with_bagua` and its properties on every `torch.nn.Module`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from bagua.engine.api import distribute
from bagua.engine.distributed_module import attached_buckets
from bagua.engine.startup.inventory import as_optimizers
from bagua.torch_api.algorithms.base import as_core_algorithm
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.process_group import as_torch_group
from bagua.torch_api.report import report_once

__all__ = ["patch", "with_bagua"]

_M = TypeVar("_M", bound=nn.Module)


@dataclass
class _Record:
    """What a module was given."""

    algorithm: Any
    optimizers: list[torch.optim.Optimizer]


# Beside the modules and not on them, so that copies and pickles of a module are plain modules.
_records: weakref.WeakKeyDictionary[nn.Module, _Record] = weakref.WeakKeyDictionary()
_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def with_bagua(
    self: _M,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    algorithm: Any,
    process_group: Any = None,
    do_flatten: bool = True,
    *,
    bucket_bytes: int | None = None,
    gradient_as_bucket_view: bool = True,
) -> _M:
    """Train this module data-parallel from now on; returns it. Collective. A second call swaps the algorithm.

    Args:
        self: the module.
        optimizers: one or several.
        algorithm: an object of `bagua.torch_api.algorithms`, a registered name, or a `bagua.Algorithm`.
        process_group: a `BaguaProcessGroup` or a `torch.distributed` group; None: all processes, or as
            before.
        do_flatten: False cannot act and is reported in the log: gradients are always exchanged in flat buckets.
        bucket_bytes: payload exchanged at once; None takes what `bagua.distribute` does.
        gradient_as_bucket_view: as in `bagua.distribute`.

    Raises:
        RuntimeError: `init_process_group()` was not called.
        ValueError, TypeError: an argument is wrong, here or (`RankMismatchError`) on another rank.

    Differs: buffers, frozen parameters and optimizer state become rank 0's too.
    """
    core = as_core_algorithm(algorithm)
    if not do_flatten:
        report_once("with_bagua: do_flatten=False has no effect: gradients are always exchanged in flat buckets")
    items = as_optimizers(optimizers)
    distribute(
        self,
        items,
        core,
        process_group=as_torch_group(process_group),
        bucket_bytes=bucket_bytes,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )
    _records[self] = _Record(algorithm, list(items))
    return self


def _module_name(self: nn.Module) -> str:
    """A label; the class's name unless set."""
    return _names.get(self, type(self).__name__)


def _set_module_name(self: nn.Module, name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"bagua_module_name: expected a str, got {type(name).__name__}")
    _names[self] = name


def _record(self: nn.Module) -> _Record:
    record = _records.get(self)
    if record is None and type(self).__module__.startswith("torch._dynamo"):
        return _Record(None, [])  # torch.compile reads every attribute of a module that it makes
    if record is None:
        raise AttributeError(f"{type(self).__name__} is not distributed; call with_bagua() first")
    return record


def _algorithm(self: nn.Module) -> Any:
    """The algorithm given to `with_bagua`."""
    return _record(self).algorithm


def _optimizers(self: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers given to `with_bagua`."""
    return _record(self).optimizers


def _buckets(self: nn.Module) -> list[BaguaBucket]:
    """The buckets; none until the first backward pass has shown their order."""
    _record(self)
    return [BaguaBucket.of(bucket) for bucket in attached_buckets(self)] if self in _records else []


def patch() -> None:
    """Put `with_bagua` and the properties `bagua_...` on `nn.Module`."""
    module: Any = nn.Module
    module.with_bagua = with_bagua
    module.bagua_module_name = property(_module_name, _set_module_name)
    module.bagua_algorithm = property(_algorithm)
    module.bagua_optimizers = property(_optimizers)
    module.bagua_buckets = property(_buckets)
