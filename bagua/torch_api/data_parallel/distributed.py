"""The original's `DistributedDataParallel`: torch's interface, Bagua's algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bagua.engine.distributed_module import no_sync
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.patch import with_bagua
from bagua.torch_api.primitives import broadcast_coalesced
from bagua.torch_api.process_group import (
    BaguaProcessGroup,
    _get_default_group,
    from_torch_group,
)
from bagua.torch_api.report import report_once

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallel_V1_9_0",
    "DistributedDataParallel_V1_9_0_Interface",
    "to_bagua_process_group",
]

_MIB = 2**20


class DistributedDataParallel(nn.Module):
    """Wraps `module` as torch's `DistributedDataParallel` does and trains it with `algorithm`. Collective.

    `state_dict` keys have the prefix `module.`. Parameters, buffers and optimizer state become rank 0's.

    Args:
        module: on its device already.
        device_ids: None, or the one GPU that the module is on: inputs are moved there.
        output_device: None or that same GPU.
        dim: 0; inputs are never split over several devices of one process.
        broadcast_buffers: give everyone rank 0's buffers before each forward pass in training mode that is to
            be synchronised.
        process_group: a `BaguaProcessGroup` or a `torch.distributed` group; None: all processes.
        bucket_cap_mb: MiB of gradients exchanged at once; None is 25.
        find_unused_parameters: needs nothing done: parameters without a gradient are always found.
        check_reduction: cannot act and is reported in the log: failures always raise.
        gradient_as_bucket_view: as in `bagua.distribute`.
        optimizers: the optimizers, for algorithms that need them and for their state at the start.
        algorithm: as in `with_bagua`.

    Raises:
        ValueError, TypeError: an argument is wrong or cannot be honoured.
        RuntimeError: `init_process_group()` was not called.

    Differs: the original falls back to torch's class, dropping `algorithm`, for some of these arguments.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device | str] | None = None,
        output_device: int | torch.device | str | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        algorithm: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
        if dim != 0:
            raise ValueError(f"dim: expected 0, got {dim!r}: inputs are not split over several devices of one process")
        if check_reduction:
            report_once("DistributedDataParallel: check_reduction has no effect: failed reductions always raise")
        self.device = _checked_device(module, device_ids, output_device)
        self.device_ids = None if self.device is None else [self.device.index]
        self.output_device = None if self.device is None else self.device.index
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.bucket_bytes_cap = _bucket_bytes(bucket_cap_mb)
        self.require_backward_grad_sync = True
        chosen = GradientAllReduceAlgorithm() if algorithm is None else algorithm
        group = to_bagua_process_group(process_group)
        self.parameters_to_ignore: set[str] = {
            *getattr(module, "_ddp_params_and_buffers_to_ignore", ()),
            *getattr(module, "_bagua_params_and_buffers_to_ignore", ()),
        }
        with_bagua(
            module,
            optimizers,
            chosen,
            group,
            bucket_bytes=self.bucket_bytes_cap,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        self.module = module
        self.process_group: BaguaProcessGroup | None = group
        self._comm: Any = group.get_global_communicator() if broadcast_buffers else None

    @property
    def inner(self) -> nn.Module:
        """The distributed module itself, which has `bagua_algorithm` and the like."""
        return self.module

    @property
    def bagua_module_name(self) -> str:
        """As on the module."""
        return self.module.bagua_module_name  # pyright: ignore

    @bagua_module_name.setter
    def bagua_module_name(self, name: str) -> None:
        self.module.bagua_module_name = name  # pyright: ignore

    @property
    def bagua_algorithm(self) -> Any:
        """As on the module."""
        return self.module.bagua_algorithm

    @property
    def bagua_optimizers(self) -> Any:
        """As on the module."""
        return self.module.bagua_optimizers

    @property
    def bagua_buckets(self) -> Any:
        """As on the module."""
        return self.module.bagua_buckets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with everyone's buffers equal to rank 0's if so wanted."""
        if self.training and self.require_backward_grad_sync and self._comm is not None:
            buffers = [buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore]
            if buffers:
                broadcast_coalesced(buffers, 0, self._comm)
        if self.device is not None:
            args, kwargs = _moved(args, self.device), _moved(kwargs, self.device)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes only accumulate; the next one outside synchronises the sum.

        Differs: what counts is where `backward()` runs; torch looks at where `forward()` ran.
        """
        before = self.require_backward_grad_sync
        with no_sync(self.module):
            self.require_backward_grad_sync = False
            try:
                yield
            finally:
                self.require_backward_grad_sync = before

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are not distributed: wrap their `.module` anew to train them."""
        return {**self.__dict__, "process_group": None, "_comm": None}

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Not offered.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("join: ranks with fewer batches than others are not supported; pad their batches")

    def scatter(self, *_: Any, **__: Any) -> NoReturn:
        """Not offered.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("scatter: there is one device per process")

    def gather(self, *_: Any, **__: Any) -> NoReturn:
        """Not offered.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("gather: there is one device per process")

    def register_comm_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Not offered.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("register_comm_hook: choose an algorithm, or write one as a bagua.Algorithm")


# In the original, a function `DistributedDataParallel` made one of these; pytorch_lightning 1.9 imports the class.
DistributedDataParallel_V1_9_0 = DistributedDataParallel
DistributedDataParallel_V1_9_0_Interface = DistributedDataParallel


def to_bagua_process_group(process_group: Any = None) -> BaguaProcessGroup:
    """Return `process_group`, of either kind, as a `BaguaProcessGroup`; None is all processes.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        TypeError: not a process group.
    """
    if process_group is None:
        return _get_default_group()
    return process_group if isinstance(process_group, BaguaProcessGroup) else from_torch_group(process_group)


def _bucket_bytes(bucket_cap_mb: float | None) -> int:
    cap = 25 if bucket_cap_mb is None else bucket_cap_mb
    if isinstance(cap, bool) or not isinstance(cap, int | float):
        raise TypeError(f"bucket_cap_mb: expected a number, got {type(cap).__name__}")
    if not cap > 0:
        raise ValueError(f"bucket_cap_mb: expected a positive number of MiB, got {cap}")
    return max(1, int(cap * _MIB))


def _checked_device(module: nn.Module, device_ids: Any, output_device: Any) -> torch.device | None:
    """The GPU to which inputs move; None: they stay where they are."""
    if not device_ids:
        if output_device is not None:
            raise ValueError("output_device: needs device_ids, which is None")
        return None
    if len(device_ids) != 1:
        raise ValueError(f"device_ids: expected the one device of this process, got {list(device_ids)}")
    wanted = _device("device_ids", device_ids[0])
    for name, param in module.named_parameters():
        if param.device != wanted:
            raise ValueError(f"device_ids: is [{wanted}], but parameter {name!r} is on {param.device}")
    if output_device is not None and _device("output_device", output_device) != wanted:
        raise ValueError(f"output_device: expected {wanted}, as in device_ids, got {output_device}")
    return wanted


def _device(name: str, value: Any) -> torch.device:
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name}: {value!r} is not a device ({error})") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`; looks into tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device) for item in value)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    return value
