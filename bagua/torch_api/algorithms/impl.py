"""The original's `AlgorithmImpl`: the base class of what an algorithm written for Bagua 0.9 does at each moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bagua.torch_api.bucket import BaguaBucket

if TYPE_CHECKING:
    from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel

__all__ = ["AlgorithmImpl"]


class AlgorithmImpl:
    """What an algorithm does at each moment of a training step. `Algorithm.reify` makes one for each module.

    The defaults exchange gradients, in buckets, as soon as they are there; an algorithm that overrides only
    `init_operations` says how. Each method `init_..._hook` returns the function that is called.

    Args:
        process_group: the ranks.
    """

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self._communication_tensor_names: set[str] = set()

    def need_reset(self) -> bool:
        """Whether to begin anew with `init_tensors`. Asked before the first forward pass of each training step."""
        return False

    def init_tensors(self, bagua_ddp: BaguaDistributedDataParallel) -> list[Tensor]:
        """Return the Bagua tensors to be exchanged. Default: all gradients, the last parameter's first."""
        tensors: list[Tensor] = []
        for name, param in reversed(bagua_ddp.bagua_build_params()):
            ready: Any = param
            tensors.append(
                ready.bagua_ensure_grad().ensure_bagua_tensor(
                    name,
                    bagua_ddp.bagua_module_name,
                    getter_closure=lambda param: param.grad,
                    setter_closure=lambda param, grad: setattr(param, "grad", grad),
                )
            )
        self._communication_tensor_names = {name for name, _ in bagua_ddp.bagua_build_params()}
        return tensors

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """Return the buckets, in the order of exchange. Default: those suggested.

        Args:
            tensors: suggested buckets, after the engine's.
            do_flatten: as given to `with_bagua`.
        """
        return [BaguaBucket(group, name=str(index), flatten=do_flatten) for index, group in enumerate(tensors)]

    def init_forward_pre_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[Any], Any]:
        """Return what is called with the module's inputs before the first forward pass of a training step."""
        return lambda _: None

    def init_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[str, nn.Parameter], Any]:
        """Return what is called with name and parameter when a gradient is there. Default: marks it ready."""

        def mark(name: str, parameter: Any) -> None:
            if name in self._communication_tensor_names:
                parameter.bagua_mark_communication_ready()

        return mark

    def init_post_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[], Any]:
        """Return what is called when a backward pass is over. Default: waits for what is under way."""
        return lambda: bagua_ddp.backend.wait_pending_comm_ops()

    def init_post_optimizer_step_hook(
        self, bagua_ddp: BaguaDistributedDataParallel
    ) -> Callable[[torch.optim.Optimizer], Any]:
        """Return what is called with each optimizer once all optimizers of a training step have stepped."""
        return lambda _: None

    def init_operations(self, bagua_ddp: BaguaDistributedDataParallel, bucket: BaguaBucket) -> None:
        """Append operations to `bucket`."""
