"""What the strategy for Fabric does, whichever package Fabric comes from."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import bagua
from bagua.algorithms import Algorithm
from lightning_bagua.options import choose

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object

__all__ = ["BaguaFabricTraining"]


class BaguaFabricTraining(_Base):
    """Data-parallel training with `bagua.distribute` in loops that are written with Fabric.

    Put in front of Fabric's `DDPStrategy`, of which processes, devices and reductions are used, and the wrapper is not:
    `fabric.setup(model, optimizer)` distributes the module itself.

    Args:
        algorithm: a name from `bagua.algorithms.available()` or an instance.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: as of DDPStrategy.
        process_group_backend: "gloo" or "nccl"; None goes by the device.
        timeout: how long to wait for a rank; None is torch's default.
        start_method: how Fabric starts processes: "popen", "spawn", "fork" or "forkserver".
        **bagua_kwargs: options of the algorithm, and of `bagua.distribute`.

    Raises:
        ValueError, TypeError: an argument is unknown or cannot act; names it.
    """

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Any = "popen",
        **bagua_kwargs: Any,
    ) -> None:
        self._algorithm, self._engine_options = choose(algorithm, True, bagua_kwargs)
        given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **given,
        )
        self._backward_sync_control = _NoSync()  # pyright: ignore[reportAttributeAccessIssue]
        # weak: a module that is dropped gives up its connections
        self._distributed: weakref.WeakKeyDictionary[nn.Module, list[torch.optim.Optimizer]] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the name "bagua" known, and none of those of DDP."""
        if "bagua" not in strategy_registry:
            strategy_registry.register("bagua", cls, description="Bagua, one process per device")

    def setup_module_and_optimizers(self, module: Any, optimizers: Any, scheduler: Any = None) -> Any:
        """Distribute `module`. Collective."""
        self._distribute(module, list(optimizers))
        return module, optimizers, scheduler

    def setup_module(self, module: Any) -> Any:
        """Distribute `module`, whose optimizers `setup_optimizer` gets later. Collective.

        Raises:
            ValueError: the algorithm needs the optimizer.
        """
        if any(param.requires_grad for param in module.parameters()):
            self._distribute(module, [])
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Distribute the modules whose parameters `optimizer` holds once more, with it. Collective."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for module, optimizers in [*self._distributed.items()]:
            if any(id(param) in held for param in module.parameters()):
                self._distribute(module, [*optimizers, optimizer])
        return optimizer

    def _distribute(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        bagua.distribute(module, optimizers, self._algorithm, **self._engine_options)
        self._distributed[module] = optimizers

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state; where replicas differ they become their mean first. Collective."""
        if module in self._distributed:
            bagua.average_parameters(module)
        return super().get_module_state_dict(module)


class _NoSync:
    """What `fabric.no_backward_sync` asks."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return bagua.no_sync(module) if enabled else nullcontext()
