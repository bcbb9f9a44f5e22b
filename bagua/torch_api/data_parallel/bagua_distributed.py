"""The original's `BaguaDistributedDataParallel`: what an algorithm written for Bagua 0.9 sees of its module."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bagua.engine.startup.inventory import ignored_names
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.scheduler import BaguaBackend

__all__ = ["BaguaDistributedDataParallel"]


class BaguaDistributedDataParallel:
    """A module, its optimizers and its buckets, as the hooks of an `AlgorithmImpl` get them. Made by `with_bagua`.

    What it lacks is read from the module.

    Attributes:
        bagua_module_name: the module's.
        bagua_optimizers: those given to `with_bagua`.
        bagua_algorithm: the `AlgorithmImpl`.
        process_group: a `BaguaProcessGroup`.
        bagua_train_step_counter: training steps begun.
        bagua_buckets: the algorithm's buckets.
        backend: their scheduler; algorithms know it as `_bagua_backend`.
        gradient_as_bucket_view: `do_flatten` of `with_bagua`.
        find_unused_parameters: False: parameters without a gradient count as zero, whatever is asked for.
    """

    find_unused_parameters = False

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "BaguaDistributedDataParallel: module.with_bagua([optimizer], algorithm) makes one, and "
            "bagua.torch_api.data_parallel.DistributedDataParallel wraps a module"
        )

    @classmethod
    def of(
        cls,
        module: nn.Module,
        module_name: str,
        optimizers: Sequence[torch.optim.Optimizer],
        process_group: Any,
        do_flatten: bool,
    ) -> BaguaDistributedDataParallel:
        """Make one. It holds the module weakly."""
        made = cls.__new__(cls)
        made._ref = weakref.ref(module)
        made.bagua_module_name, made.bagua_optimizers = module_name, list(optimizers)
        made.process_group, made.gradient_as_bucket_view = process_group, do_flatten
        made.parameters_to_ignore = sorted(ignored_names(module))
        made.bagua_train_step_counter, made.bagua_buckets, made.bagua_algorithm = 0, [], None
        return made

    _ref: weakref.ref[nn.Module]
    backend: BaguaBackend
    bagua_module_name: str
    bagua_optimizers: list[torch.optim.Optimizer]
    bagua_algorithm: Any
    bagua_buckets: list[BaguaBucket]
    bagua_train_step_counter: int
    process_group: Any
    gradient_as_bucket_view: bool
    parameters_to_ignore: list[str]

    @property
    def _bagua_backend(self) -> BaguaBackend:
        """The scheduler, under the name that algorithms know."""
        return self.backend

    @property
    def module(self) -> nn.Module:
        """The module.

        Raises:
            RuntimeError: it no longer exists.
        """
        module = self._ref()
        if module is None:
            raise RuntimeError("the module of this algorithm no longer exists")
        return module

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that are exchanged: they require a gradient, and are neither ignored nor experts'."""
        ignored = ignored_names(self.module)
        return [(n, p) for n, p in self.module.named_parameters() if p.requires_grad and n not in ignored]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in type(self).__annotations__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.module, name)
