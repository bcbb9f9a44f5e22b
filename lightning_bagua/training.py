"""What the strategy does at each moment of a Trainer's run, whichever package the Trainer comes from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import bagua
from bagua.algorithms import Algorithm
from bagua.comm.team import Team
from bagua.errors import CommunicationError
from bagua.interop.agreeing_scaler import agreeing_scaler
from lightning_bagua.averaged_models import average_models, pause_with_weights
from lightning_bagua.callbacks import check_callbacks
from lightning_bagua.options import choose
from lightning_bagua.rank_state import KEY, gather, put_back
from lightning_bagua.redirection import call_through_hooks

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

__all__ = ["BaguaTraining"]

_log = logging.getLogger("bagua")


class BaguaTraining(_Base):
    """Data-parallel training with `bagua.distribute`, in processes that Lightning starts or finds.

    Put in front of Lightning's `DDPStrategy`, of which processes, devices, samplers and reductions are used, and the
    wrapper is not: the LightningModule itself is distributed, once its optimizers exist.

    Args:
        algorithm: a name from `bagua.algorithms.available()` or an instance.
        flatten: True; there for scripts of the original.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as of DDPStrategy.
        process_group_backend: "gloo" or "nccl"; None goes by the device.
        timeout: how long to wait for a rank; None is torch's default.
        start_method: how Lightning starts processes: "popen", "spawn", "fork" or "forkserver".
        **bagua_kwargs: options of the algorithm, and of `bagua.distribute`: bucket_bytes, num_lanes, hierarchical,
            guard, broadcast_buffers, static_graph, gradient_as_bucket_view, rank_order.

    Raises:
        ValueError, TypeError: an argument is unknown or cannot act; names it.
    """

    strategy_name = "bagua"

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Any = "popen",
        **bagua_kwargs: Any,
    ) -> None:
        self._algorithm, self._engine_options = choose(algorithm, flatten, bagua_kwargs)
        self._trained: Any = None  # the LightningModule while it is distributed
        self._last_state: dict[str, Any] | None = None  # the algorithm's, at the end of the last fit
        self._interrupted = False
        given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **given,
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the name "bagua" known, and none of those of DDP."""
        if "bagua" not in strategy_registry:
            strategy_registry.register("bagua", cls, description="Bagua, one process per device")

    # -- setting up ----------------------------------------------------------------------------------------------

    def configure_ddp(self) -> None:
        """No wrapper."""

    def setup(self, trainer: Any) -> None:
        """Set up as DDP does, up to the optimizers; then distribute. Collective.

        Raises:
            ValueError: a callback does not work with the algorithm; names both.
        """
        self._interrupted = False
        if trainer.state.fn == "fit":
            check_callbacks(trainer.callbacks, self._algorithm)
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._distribute()

    def _distribute(self) -> None:
        module: Any = self.lightning_module
        plugin: Any = self.precision_plugin
        if isinstance(getattr(plugin, "scaler", None), torch.amp.GradScaler):
            plugin.scaler = agreeing_scaler(plugin.scaler, self.root_device)
        bagua.distribute(module, self._real_optimizers(), self._algorithm, **self._engine_options)
        self._trained, self._last_state = module, None

    def _real_optimizers(self) -> list[torch.optim.Optimizer]:
        """Without the stand-in for `configure_optimizers` that returns None."""
        return [optimizer for optimizer in self.optimizers if type(optimizer).__name__ != "_MockOptimizer"]

    # -- steps ---------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's `training_step` as a forward pass, so that hooks learn of it, as with DDP."""
        module = self._trained
        if module is None:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return call_through_hooks(module, "training_step", *args, **kwargs)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure, forward and backward pass, before the step; algorithms act between the two.

        Raises:
            RuntimeError: the optimizer evaluates its closure several times in a step, as LBFGS does.
        """
        outcome: list[Any] = [closure()]

        def evaluated() -> Any:
            if not outcome:
                raise RuntimeError(
                    f"{type(optimizer).__name__} evaluates its closure several times in a step, as often as the "
                    "losses of this rank ask for; ranks have different losses, so one would wait for a backward pass "
                    "that the others never make. The bagua strategy takes optimizers that evaluate it once"
                )
            return outcome.pop()

        return super().optimizer_step(optimizer, evaluated, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it, backward passes only accumulate."""
        with bagua.no_sync(self._trained) if self._trained is not None else nullcontext():
            yield

    # -- evaluation in the course of the training ------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Where replicas differ, evaluate their mean, and let nothing change it meanwhile. Collective."""
        super().on_validation_start()
        if self._trained is not None:
            self._average(self._trained)
            bagua.pause(self._trained)

    def on_validation_end(self) -> None:
        """Let what runs in the background run again."""
        if self._trained is not None:
            bagua.resume(self._trained)
        super().on_validation_end()

    def _average(self, module: Any) -> None:
        """Where replicas differ, make them and the models that callbacks form of them equal. Collective."""
        bagua.average_parameters(module)
        average_models(module.trainer.callbacks, module)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state; where replicas differ they become their mean first. Collective."""
        if self._trained is not None:
            self._average(self._trained)
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write on rank 0, with what the other ranks hold besides. Collective."""
        state = bagua.state_dict(self._trained) if self._trained is not None else self._last_state
        if state is not None and "optimizer_states" in checkpoint:  # not of weights alone
            module: Any = self.lightning_module
            optimizers = self._real_optimizers()
            checkpoint = {**checkpoint, KEY: gather(module, optimizers, state, self._team(), self.root_device)}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Put back optimizers, and this rank's share of what `save_checkpoint` gathered. Collective."""
        super().load_optimizer_state_dict(checkpoint)
        if self._trained is None:
            return
        if KEY not in checkpoint:
            self._warn("the checkpoint was made without the bagua strategy; the algorithm starts anew")
            return
        remark = put_back(checkpoint[KEY], self._trained, self._real_optimizers(), self._team())
        if remark is not None:
            self._warn(remark)

    def _team(self) -> Team:
        return Team.of(None, self.root_device)

    def _warn(self, text: str) -> None:
        if self.is_global_zero:
            _log.warning("%s: %s", self.strategy_name, text)

    # -- the end ---------------------------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Leave all ranks with one model, and keep the algorithm's state for `Trainer.save_checkpoint`. Collective."""
        if self._trained is not None:
            pause_with_weights(self._trained.trainer.callbacks, self._trained)
            self._average(self._trained)
            self._last_state = bagua.state_dict(self._trained)
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        """Note that other ranks may be gone."""
        self._interrupted = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Make the module a plain one again."""
        module: nn.Module | None = self._trained
        self._trained = None
        if module is not None:
            try:
                bagua.detach(module)
            except CommunicationError as error:
                if not self._interrupted:
                    raise
                _log.info("detach after an exception: %s", error)  # that exception is what the user is told
        super().teardown()
