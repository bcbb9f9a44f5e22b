"""Hugging Face Accelerate: an `Accelerator` that distributes models with Bagua."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bagua.algorithms import Algorithm
from bagua.checkpoint.agree import agree_on, team_of
from bagua.checkpoint.errors import CheckpointError
from bagua.interop.agreeing_scaler import agreeing_scaler
from bagua.interop.damaged_files import name_damaged_file
from bagua.interop.replicas import Replicas, check_plain, own_storage, require_processes

if TYPE_CHECKING:
    _Accelerator: Any = object
else:
    try:
        from accelerate import Accelerator as _Accelerator
    except ImportError as error:
        raise ImportError("bagua.interop.accelerate needs accelerate: pip install 'bagua[accelerate]'") from error

__all__ = ["BaguaAccelerator"]


class BaguaAccelerator(_Accelerator):
    """`accelerate.Accelerator` that trains models with `bagua.distribute` instead of `DistributedDataParallel`.

    `prepare` distributes the models; pass it a model together with its optimizers. Mixed precision, accumulation,
    clipping and data loaders are Accelerate's. `save_state` and `load_state` include the algorithm's state.

    Args:
        *args, **kwargs: of `accelerate.Accelerator`. Settings of DDP (`DistributedDataParallelKwargs`) have no effect.
        algorithm: a name from `bagua.algorithms.available()` or an instance.
        bagua_options: options of the algorithm, and keyword arguments of `bagua.distribute`.

    Raises:
        TypeError, ValueError: an option is unknown; Accelerate is configured for DeepSpeed, FSDP, Megatron-LM or XLA.
        RuntimeError: Accelerate counts other processes than the process group has.

    Examples:
        >>> from bagua.interop.accelerate import BaguaAccelerator
        >>> accelerator = BaguaAccelerator(algorithm="bytegrad", gradient_accumulation_steps=4)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    def __init__(
        self,
        *args: Any,
        algorithm: str | Algorithm = "gradient_allreduce",
        bagua_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._replicas = Replicas(algorithm, bagua_options)
        self._to_train: list[nn.Module] = []  # prepared for training
        self._preparing = False  # several objects, of which the optimizers may come last
        self._loading: str | None = None  # directory of the checkpoint that is being loaded
        super().__init__(*args, **kwargs)
        check_plain(self, type(self).__name__)
        require_processes(
            self.num_processes,
            "Accelerate",
            "start the ranks with `accelerate launch`, torchrun or `bagua run`, and pass cpu=True to train on CPUs",
        )
        if self.scaler is not None:
            self.scaler = agreeing_scaler(self.scaler, self.device)
        self.register_load_state_pre_hook(self._note_checkpoint)

    # -- preparing -----------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare all objects; models are distributed with those optimizers that hold their parameters. Collective.

        Raises:
            ValueError: the algorithm needs an optimizer that is not among them, or a model is wrapped already.
        """
        self._preparing = True
        try:
            result = super().prepare(*args, device_placement=device_placement)
        finally:
            self._preparing = False
        self._distribute()
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare one model. It is distributed unless `evaluation_mode`, or if nothing in it is trained."""
        prepared = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        trains = any(param.requires_grad for param in prepared.parameters())
        if not evaluation_mode and trains and all(each is not prepared for each in self._to_train):
            self._to_train.append(prepared)
            if not self._preparing:
                self._distribute()
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare one optimizer. The models whose parameters it holds are distributed again, with it."""
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        if not self._preparing:
            self._distribute()
        return prepared

    def _distribute(self) -> None:
        for module in self._to_train:
            params = {id(param) for param in module.parameters() if param.requires_grad}
            holders = [
                optimizer
                for optimizer in self._optimizers
                if any(id(param) in params for group in optimizer.param_groups for param in group["params"])
            ]
            self._replicas.distribute(module, holders)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The model's state dict; tensors that are views of Bagua's buckets are copied."""
        return own_storage(super().get_state_dict(model, unwrap=unwrap))

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerate does, and what its files do not hold in the folder "bagua". Collective.

        Where replicas differ they become their mean first. All ranks must see the same directory.

        Raises:
            CheckpointError: another rank could not save; names it and its error.
        """
        parent = super()
        with self._replicas.settled():
            what = "saving the state" if output_dir is None else f"saving the state to {output_dir}"
            place = agree_on(team_of(None), what, lambda: parent.save_state(output_dir, *args, **kwargs))
            self._replicas.save(place, self.step)
        return place

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` saved. Collective.

        The models are distributed anew. If the checkpoint was made without Bagua, so does the algorithm start.

        Raises:
            CheckpointError: a file is missing or truncated, or another rank could not load; names it.
        """
        self._loading = None
        self._replicas.release()  # safetensors refuses to load into views of buckets
        parent = super()

        def load() -> None:
            try:
                parent.load_state(input_dir, *args, **kwargs)
            except Exception as error:
                damage = None if self._loading is None else name_damaged_file(Path(self._loading), error)
                if damage is None:
                    raise
                raise CheckpointError(damage) from error

        try:
            what = "loading the state" if input_dir is None else f"loading the state from {input_dir}"
            agree_on(team_of(None), what, load)
        finally:
            self._distribute()
        assert self._loading is not None
        self._replicas.load(self._loading)

    def _note_checkpoint(self, models: list[nn.Module], input_dir: str | os.PathLike[str]) -> None:
        self._loading = str(Path(input_dir))

    # -- evaluation, the end -------------------------------------------------------------------------------------

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within it all ranks hold the mean of the weights, and nothing changes it in the background. Collective.

        For algorithms whose replicas differ, or that communicate in the background; with others it has no effect.
        """
        with self._replicas.settled():
            yield

    def free_memory(self, *objects: Any) -> Any:
        """Make distributed models plain ones, and forget all that was prepared."""
        self._replicas.release()
        self._to_train.clear()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Average the weights where replicas differ, make models plain ones, and end trackers and process group."""
        self._replicas.average()
        self._replicas.release()
        super().end_training()
