"""What importing the facade patches: `with_bagua` and its properties on every `torch.nn.Module`."""

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
from bagua.torch_api.adapter import AdaptedAlgorithm, adapt, attach_session
from bagua.torch_api.algorithms.base import Algorithm, as_core_algorithm, is_written_for_original
from bagua.torch_api.bucket import BaguaBucket, EngineBucket
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from bagua.torch_api.process_group import BaguaProcessGroup, _get_default_group, as_torch_group, from_torch_group
from bagua.torch_api.report import report_once

__all__ = ["patch", "with_bagua"]

_M = TypeVar("_M", bound=nn.Module)


@dataclass
class _Record:
    """What a module was given; `adapted` if the algorithm is one written for Bagua 0.9."""

    algorithm: Any
    optimizers: list[torch.optim.Optimizer]
    process_group: Any = None
    adapted: AdaptedAlgorithm | None = None


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
        algorithm: an object of `bagua.torch_api.algorithms`, a registered name, a `bagua.Algorithm`, or an algorithm
            written for Bagua 0.9: an `Algorithm` whose `reify` returns an `AlgorithmImpl`.
        process_group: a `BaguaProcessGroup` or a `torch.distributed` group; None: all processes, or as
            before.
        do_flatten: goes to `tensors_to_buckets` of an algorithm written for Bagua 0.9. With others False has no effect
            and is reported in the log: gradients are always exchanged in flat buckets.
        bucket_bytes: payload exchanged at once; None takes what `bagua.distribute` does.
        gradient_as_bucket_view: as in `bagua.distribute`.

    Raises:
        RuntimeError: `init_process_group()` was not called.
        ValueError, TypeError: an argument is wrong, here or (`RankMismatchError`) on another rank.

    Differs: buffers, frozen parameters and optimizer state become rank 0's too.
    """
    if isinstance(algorithm, str):
        algorithm = Algorithm.init(algorithm)
    items = as_optimizers(optimizers)
    before = _records.get(self) if isinstance(self, nn.Module) else None
    if process_group is None and before is not None:
        process_group = before.process_group
    adapted: AdaptedAlgorithm | None = None
    num_lanes: int | None = None
    if is_written_for_original(algorithm):
        group = _as_bagua_group(process_group)
        adapted = adapt(algorithm, self, _module_name(self), items, group, do_flatten)
        num_lanes = 1  # buckets are exchanged one after the other
    elif not do_flatten:
        report_once("with_bagua: do_flatten=False has no effect: gradients are always exchanged in flat buckets")
    try:
        distribute(
            self,
            items,
            as_core_algorithm(algorithm) if adapted is None else adapted,
            process_group=as_torch_group(process_group),
            bucket_bytes=bucket_bytes,
            num_lanes=num_lanes,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
    except BaseException:
        if before is not None and before.adapted is not None:
            before.adapted.session.forget()  # tensors may belong to buckets of the one that failed
        raise
    attach_session(self, adapted)
    runs = algorithm if adapted is None else adapted.session.impl
    _records[self] = _Record(runs, list(items), process_group, adapted)
    return self


def _as_bagua_group(process_group: Any) -> BaguaProcessGroup:
    if process_group is None:
        return _get_default_group()
    return process_group if isinstance(process_group, BaguaProcessGroup) else from_torch_group(process_group)


def _module_name(self: nn.Module) -> str:
    """A label; the class's name unless set."""
    return _names.get(self, type(self).__name__)


def _set_module_name(self: nn.Module, name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"bagua_module_name: expected a str, got {type(name).__name__}")
    _names[self] = name


def _record(self: nn.Module) -> _Record:
    record = _records.get(self)
    if record is None and _is_made_by_compiler(self):
        return _Record(None, [])
    if record is None:
        raise AttributeError(f"{type(self).__name__} is not distributed; call with_bagua() first")
    return record


def _is_made_by_compiler(module: nn.Module) -> bool:
    """torch.compile reads every attribute of a module that it makes."""
    return type(module).__module__.startswith("torch._dynamo")


def _algorithm(self: nn.Module) -> Any:
    """The algorithm given to `with_bagua`; of one written for Bagua 0.9, the `AlgorithmImpl`."""
    return _record(self).algorithm


def _optimizers(self: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers given to `with_bagua`."""
    return _record(self).optimizers


def _buckets(self: nn.Module) -> list[BaguaBucket]:
    """The buckets; none until the first backward pass has shown their order."""
    record = _record(self)
    if record.adapted is not None:
        return list(record.adapted.session.ddp.bagua_buckets)
    return [EngineBucket(bucket) for bucket in attached_buckets(self)] if self in _records else []


def _ddp(self: nn.Module) -> BaguaDistributedDataParallel | None:
    """What an algorithm written for Bagua 0.9 sees of the module."""
    record = _record(self)
    if record.adapted is None:
        if _is_made_by_compiler(self):
            return None
        raise AttributeError(f"{type(self).__name__} is not distributed by an algorithm written for Bagua 0.9")
    return record.adapted.session.ddp


def patch() -> None:
    """Put `with_bagua` and the properties `bagua_...` on `nn.Module`."""
    module: Any = nn.Module
    # TorchScript would compile the getters with every module that is scripted or traced.
    unused = torch.jit.unused
    module.with_bagua = with_bagua
    module.bagua_module_name = property(unused(_module_name), _set_module_name)
    module.bagua_algorithm = property(unused(_algorithm))
    module.bagua_optimizers = property(unused(_optimizers))
    module.bagua_buckets = property(unused(_buckets))
    module.bagua_ddp = property(unused(_ddp))
