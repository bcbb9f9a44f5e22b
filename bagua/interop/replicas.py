"""What the integrations with Hugging Face do with the modules that they distribute."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua import engine
from bagua.algorithms import Algorithm
from bagua.checkpoint.rank_state import load_rank_state, save_rank_state
from bagua.comm.world import init_process_group
from bagua.engine.hooks import attachments
from bagua.interop.engine_options import split_options

__all__ = ["FOLDER", "Replicas", "check_plain", "own_storage", "require_processes"]

FOLDER = "bagua"  # of a checkpoint: what the framework's own files do not hold
_PROVIDED = ("process_group", "fault_tolerant")
_SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
_log = logging.getLogger("bagua")

State = TypeVar("State", bound=dict[str, Any])


class Replicas:
    """Distributed modules with the optimizers that step them, all with one algorithm.

    Args:
        algorithm: a name from `bagua.algorithms.available()` or an instance.
        options: of the algorithm, and keyword arguments of `bagua.distribute`.

    Raises:
        TypeError, ValueError: an option is unknown or cannot be given; names it.
    """

    def __init__(self, algorithm: str | Algorithm, options: Mapping[str, Any] | None) -> None:
        self.algorithm, self._options = split_options(algorithm, options or {}, _PROVIDED)
        self._trained: dict[nn.Module, Sequence[torch.optim.Optimizer]] = {}

    def __contains__(self, module: object) -> bool:
        return module in self._trained

    @property
    def modules(self) -> list[nn.Module]:
        """Those that are distributed now."""
        return list(self._trained)

    def distribute(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Distribute `module`, again if its optimizers are others now. Collective."""
        if [*map(id, self._trained.get(module, ()))] == [*map(id, optimizers)] and module in self._trained:
            return
        engine.distribute(module, optimizers, self.algorithm, **self._options)
        self._trained[module] = optimizers
        # Accelerate looks for this method, DDP's, when gradients are only to be accumulated.
        vars(module)["no_sync"] = functools.partial(engine.no_sync, module)

    def release(self) -> None:
        """Make all of them plain modules again."""
        trained, self._trained = self._trained, {}
        for module in trained:
            vars(module).pop("no_sync", None)
            if module in attachments:
                engine.detach(module)

    def average(self) -> None:
        """Make the weights of all ranks equal, where they differ. Collective."""
        for module in self._trained:
            engine.average_parameters(module)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Within it all ranks hold the mean of the weights, and nothing changes it in the background. Collective."""
        self.average()
        paused = [module for module in self._trained if not attachments[module].engine.state.paused]
        for module in paused:
            engine.pause(module)
        try:
            yield
        finally:
            for module in paused:
                if module in attachments:
                    engine.resume(module)

    def save(self, checkpoint: str | os.PathLike[str], step: int) -> None:
        """Add to a framework's checkpoint what its files do not hold. Collective."""
        if self._trained:
            save_rank_state(Path(checkpoint) / FOLDER, list(self._trained.items()), step=step)

    def load(self, checkpoint: str | os.PathLike[str]) -> None:
        """Put back what `save` added, after the framework has loaded its files. Collective."""
        trained = list(self._trained.items())
        if not trained:
            return
        remarks = load_rank_state(Path(checkpoint) / FOLDER, trained)
        if remarks is None:
            remarks = [f"{checkpoint} was made without Bagua; {self.algorithm.name} starts anew"] * len(trained)
        for (module, optimizers), remark in zip(trained, remarks, strict=True):
            if remark:
                if dist.get_rank() == 0:
                    _log.warning("%s", remark)
                engine.distribute(module, optimizers, self.algorithm, **self._options)


def check_plain(accelerator: Any, what: str) -> None:
    """Refuse an Accelerator that shards the model or reduces its gradients itself.

    Raises:
        ValueError: names what is configured.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    # On CPUs Accelerate passes over plugins, of which it leaves a note in the environment.
    noted = [name for name in _SHARDED if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true")]
    for name in _SHARDED:
        if name == kind or name in noted:
            raise ValueError(
                f"{what}: Accelerate is configured for {name}, which shards the model or reduces its gradients itself; "
                "use plain data parallelism (distributed_type NO, MULTI_CPU or MULTI_GPU)"
            )
    mesh = getattr(accelerator, "parallelism_config", None)
    if mesh is not None and any(
        getattr(mesh, f"{name}_enabled", False) for name in ("tp", "cp", "sp", "dp_shard", "dp_replicate")
    ):
        raise ValueError(f"{what}: a parallelism_config divides the model or the batch; use plain data parallelism")
    handler = accelerator.ddp_handler
    hook = str(getattr(getattr(handler, "comm_hook", None), "value", "no"))
    if hook != "no":
        raise ValueError(
            f"{what}: comm_hook={hook!r} is a hook of DistributedDataParallel, which is not used; choose an algorithm"
        )


def require_processes(count: int, what: str, hint: str) -> None:
    """Initialise `torch.distributed` if the framework has not, and check that both count the same processes.

    Raises:
        RuntimeError: they do not: each rank would train on all of the data.
    """
    init_process_group()
    if dist.get_world_size() != count:
        raise RuntimeError(
            f"{what} counts {count} process{'es' * (count != 1)}, and the process group has {dist.get_world_size()}; "
            f"{hint}"
        )


def own_storage(state: State) -> State:
    """`state`, with copies of tensors that are views of something larger: savers take such for tied weights.

    Tensors that are the same stay the same. The type stays, too: savers drop the names of tied weights from an
    `OrderedDict` only, and loaders look for its `_metadata`.
    """
    copies: dict[Any, Tensor] = {}

    def compact(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.untyped_storage().nbytes() <= value.nbytes:
            return value
        place = value.device, value.dtype, value.data_ptr(), value.shape, value.stride()
        if place not in copies:
            copies[place] = value.detach().clone()
        return copies[place]

    compacted = copy.copy(state)
    for name, value in state.items():
        compacted[name] = compact(value)
    return compacted
