"""Hugging Face `Trainer`: one that distributes the model with Bagua, and a mixin for its subclasses."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from bagua import engine
from bagua.algorithms import Algorithm
from bagua.engine import Stats
from bagua.engine.startup.conflicts import check_wrapped
from bagua.interop.agreeing_scaler import agreeing_scaler
from bagua.interop.replicas import Replicas, check_plain, own_storage, require_processes

if TYPE_CHECKING:
    _Trainer: Any = object
    _Callback: Any = object
    _Base: Any = object
else:
    try:
        from transformers import Trainer as _Trainer
        from transformers import TrainerCallback as _Callback
    except ImportError as error:
        raise ImportError("bagua.interop.transformers needs transformers: pip install 'bagua[transformers]'") from error
    _Base = object

__all__ = ["BaguaTrainer", "BaguaTrainerMixin"]


class BaguaTrainerMixin(_Base):
    """Makes a subclass of `transformers.Trainer` train with `bagua.distribute` instead of `DistributedDataParallel`.

        class BaguaSFTTrainer(BaguaTrainerMixin, SFTTrainer):
            pass

    The model is distributed when `train` begins and is a plain module again when it ends. Evaluation and checkpoints
    see the mean of the replicas where they differ. Checkpoints hold the algorithm's state in their folder "bagua";
    `resume_from_checkpoint` needs it to go on exactly. All ranks must see the same directory.

    Args:
        *args, **kwargs: of the Trainer. `TrainingArguments` that begin with `ddp_` have no effect, but the backend's
            and the timeout.
        algorithm: a name from `bagua.algorithms.available()` or an instance.
        bagua_options: options of the algorithm, and keyword arguments of `bagua.distribute`.

    Raises:
        TypeError, ValueError: an option is unknown; the model is wrapped already; DeepSpeed, FSDP, DataParallel or
            another way to divide the model is configured.
        RuntimeError: the Trainer counts other processes than the process group has.
    """

    def __init__(
        self,
        *args: Any,
        algorithm: str | Algorithm = "gradient_allreduce",
        bagua_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._replicas = Replicas(algorithm, bagua_options)
        self._resumed_from: str | None = None
        self._last_stats: Stats | None = None
        super().__init__(*args, **kwargs)
        this: Any = self
        if this.args.n_gpu > 1:
            raise ValueError(
                f"{type(self).__name__}: one process drives {this.args.n_gpu} GPUs with DataParallel; start one "
                "process per GPU with torchrun or `bagua run`"
            )
        if getattr(this.model, "is_distributed_loading_by_transformers", False):
            raise ValueError(f"{type(self).__name__}: the model was divided over the ranks when it was loaded")
        check_wrapped(this.model)
        this.callback_handler.callbacks.insert(0, _Moments(self))

    @property
    def bagua_stats(self) -> Stats | None:
        """Statistics of the communication: of the training in progress, or of the last one; None before."""
        for module in self._replicas.modules:
            return engine.stats(module)
        return self._last_stats

    # -- setting up ----------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and keep it from wrapping the model in DDP."""
        super().create_accelerator_and_postprocess()
        this: Any = self
        check_plain(this.accelerator, type(self).__name__)
        require_processes(
            this.accelerator.num_processes,
            "TrainingArguments",
            "start the ranks with torchrun, `accelerate launch` or `bagua run`, and pass use_cpu=True to train on CPUs",
        )
        if this.accelerator.scaler is not None:
            this.accelerator.scaler = agreeing_scaler(this.accelerator.scaler, this.accelerator.device)
        prepare = this.accelerator.prepare_model
        this.accelerator.prepare_model = functools.partial(self._prepare_model, prepare)

    def _prepare_model(self, prepare: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Prepare for mixed precision and `torch.compile` as Accelerate does, without its wrapper."""
        this: Any = self
        if model is this.model or model is this.model_wrapped:
            kwargs["evaluation_mode"] = True
            args = args[:1]
        return prepare(model, *args, **kwargs)

    def distribute_model(self) -> None:
        """Distribute the model, and load the algorithm's state if training is resumed. Collective."""
        this: Any = self
        self._replicas.release()  # of a training that an exception has ended
        self._replicas.distribute(this.model_wrapped, [this.optimizer])
        resumed_from, self._resumed_from = self._resumed_from, None
        if resumed_from is not None:
            self._replicas.load(resumed_from)

    def release_model(self) -> None:
        """Leave all ranks with one plain model. Collective."""
        self._replicas.average()
        self._last_stats = self.bagua_stats
        self._replicas.release()

    # -- evaluation, checkpoints -----------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the mean of the replicas. Collective."""
        with self._replicas.settled():
            return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with self._replicas.settled():
            return super()._save_checkpoint(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        this: Any = self
        if state_dict is None and self._replicas.modules and this.args.should_save:
            state_dict = own_storage(this.model.state_dict())
        super()._save(output_dir, state_dict=state_dict)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save what each rank holds of its own: random state, and the algorithm's."""
        super()._save_rng_state(output_dir)
        this: Any = self
        self._replicas.save(output_dir, this.state.global_step)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._resumed_from = None if checkpoint is None else os.fspath(checkpoint)

    def _load_best_model(self) -> None:
        for module in self._replicas.modules:  # what is in the background must not reach the weights that come
            engine.average_parameters(module)
            engine.pause(module)
        super()._load_best_model()


class _Moments(_Callback):
    """The first callback: others find a distributed model when training begins, and one plain model at its end."""

    def __init__(self, trainer: BaguaTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Distribute."""
        self._trainer.distribute_model()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Average and detach."""
        self._trainer.release_model()


class BaguaTrainer(BaguaTrainerMixin, _Trainer):
    """`transformers.Trainer` that trains with `bagua.distribute`: see `BaguaTrainerMixin`.

    Examples:
        >>> from bagua.interop.transformers import BaguaTrainer
        >>> trainer = BaguaTrainer(model, args, train_dataset=data, algorithm="bytegrad")
        >>> result = trainer.train()
    """
