"""The state of an algorithm written for Bagua 0.9 and of its module: what it made, and its moments."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Bucket, Context
from bagua.comm.groups import Groups
from bagua.engine.reducer.bucketing import default_bucket_bytes
from bagua.engine.startup.broadcast import replicate_tensors
from bagua.exchanges import AllReduce, Exchange, State
from bagua.torch_api.bucket import Away, BaguaBucket
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from bagua.torch_api.operations import Centralized
from bagua.torch_api.scheduler import BaguaBackend
from bagua.torch_api.tensor import effective_tensor, record_of

__all__ = ["AdapterSession"]


@dataclass(frozen=True, eq=False)
class _Operations(Exchange):
    """Operations of the buckets in `queue`, one bucket a run. The lane keeps the order of launches."""

    queue: deque[tuple[BaguaBucket, Away]] = field(default_factory=deque, repr=False)

    @property
    def complete(self) -> bool:
        """Nobody knows."""
        return False

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Run those of the next bucket; what is exchanged is the bucket's, not `x_N`."""
        bucket, away = self.queue.popleft()
        bucket.execute(groups, away)

    def run_alone(self) -> None:
        """The same with a single rank."""
        bucket, away = self.queue.popleft()
        bucket.execute(None, away)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """That of an all-reduce; the algorithm does not say."""
        return AllReduce().bytes_per_rank(n, size)


@dataclass(frozen=True, eq=False)
class _Broadcast(Exchange):
    """Weights become those of rank 0."""

    params: tuple[nn.Parameter, ...] = field(default=(), repr=False)

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """All parameters, whatever `x_N` is."""
        replicate_tensors(self.params, groups.world, x_N.device)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """Once."""
        return 4 * n


class AdapterSession:
    """One module with an algorithm written for Bagua 0.9: the state that the algorithm keeps, unlike those of ours.

    Args:
        algorithm: the declaration, with `reify`.
        module: held weakly.

    Attributes:
        ddp: what the algorithm sees of the module.
        impl: what `reify` returned.
        exchanges_gradients: every gradient is replaced by one that all ranks share, and nothing else is done.
    """

    def __init__(
        self,
        algorithm: Any,
        module: nn.Module,
        module_name: str,
        optimizers: Sequence[torch.optim.Optimizer],
        process_group: Any,
        do_flatten: bool,
    ) -> None:
        self._algorithm = algorithm
        self.ddp = BaguaDistributedDataParallel.of(module, module_name, optimizers, process_group, do_flatten)
        self.impl: Any = None
        self._operations = _Operations()
        self._ctx: Context | None = None
        self._after_step: Any = None
        self._forward_due = self._stale = False
        self.exchanges_gradients = False

    # -- set up --------------------------------------------------------------------------------------------------

    def set_up(self, ctx: Context) -> None:
        """Reify the algorithm, the first time, and make its tensors, buckets and operations."""
        self._ctx = ctx
        self._operations.queue.clear()
        ctx.prepare(self._operations, ctx.buckets[0])
        self.ddp.backend = BaguaBackend(self._launch, ctx.wait)
        if self.impl is None:
            self.impl = self.ddp.bagua_algorithm = self._algorithm.reify(self.ddp.process_group)
            if self.impl is None:
                raise TypeError(f"{type(self._algorithm).__qualname__}.reify() returned None, not an AlgorithmImpl")
        self._initialise(ctx)

    def _initialise(self, ctx: Context) -> None:
        """Make tensors, buckets, operations."""
        ddp, impl = self.ddp, self.impl
        tensors = list(impl.init_tensors(ddp))
        if any(record_of(tensor) is None for tensor in tensors):
            raise TypeError("init_tensors: expected Bagua tensors, which ensure_bagua_tensor() returns")
        ddp.bagua_buckets = list(impl.tensors_to_buckets(_suggested(tensors, ctx.buckets), ddp.gradient_as_bucket_view))
        if not ddp.bagua_buckets or not all(isinstance(bucket, BaguaBucket) for bucket in ddp.bagua_buckets):
            raise TypeError("tensors_to_buckets: expected a list of BaguaBucket, with at least one")
        for bucket in ddp.bagua_buckets:
            impl.init_operations(ddp, bucket)
            self._check_operations(bucket, ctx)
        ddp.backend.register_ordered_buckets(ddp.bagua_buckets)
        self._after_step = impl.init_post_optimizer_step_hook(ddp)
        self._stale = False
        self.exchanges_gradients = self._takes_means_of_all_gradients()

    def _check_operations(self, bucket: BaguaBucket, ctx: Context) -> None:
        for operation in bucket.operations:
            other = getattr(operation.group, "ranks", None)
            if other is not None and list(other) != list(self.ddp.process_group.ranks):
                raise NotImplementedError(
                    f"bucket {bucket.name!r}: an operation has the group of ranks {list(other)}, and the module "
                    f"is distributed over {list(self.ddp.process_group.ranks)}; pass with_bagua(process_group=...), or "
                    "write a bagua.Algorithm"
                )
            if operation.hierarchical and operation.compresses and len(ctx.groups.nodes) == 1:
                ctx.notice(
                    "hierarchical=True, but all ranks are on one node: the exchange between nodes never runs, and "
                    "nothing is compressed on the way"
                )

    def _launch(self, bucket: BaguaBucket) -> None:
        ctx = self._ctx
        assert ctx is not None
        self._operations.queue.append((bucket, bucket.collect()))
        alone = self._operations.run_alone if ctx.groups.size == 1 else None
        ctx.launch(self._operations, ctx.buckets[0], before=alone)

    # -- moments -------------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """The next forward pass is the first of a training step."""
        self._forward_due = True

    def before_forward(self, inputs: Any) -> None:
        """From the module's hook, with its inputs."""
        ctx = self._ctx
        if not self._forward_due or ctx is None:
            return
        self._forward_due = False
        self.ddp.bagua_train_step_counter += 1
        reset = self.impl.need_reset()
        if reset:
            self._equalise(ctx)
        if reset or self._stale:
            self.ddp.backend.wait_pending_comm_ops()
            self._initialise(ctx)
        self.impl.init_forward_pre_hook(self.ddp)(inputs)

    def _equalise(self, ctx: Context) -> None:
        """Before a reset, as the original: everyone's weights become those of rank 0."""
        ctx.wait()
        params = [param for bucket in ctx.buckets for param in bucket.params]
        run = _Broadcast(tuple(params))
        ctx.prepare(run, ctx.buckets[0])
        ctx.launch(run, ctx.buckets[0])
        ctx.wait()

    def gradients_ready(self, bucket: Bucket) -> None:
        """All gradients of an engine bucket are there: run the backward hook for each of its parameters."""
        self.before_forward(())  # if torch.compile took the module's hooks into its graph
        for name, param in zip(bucket.names, bucket.params, strict=True):
            self.impl.init_backward_hook(self.ddp)(name, param)

    def backward_ends(self) -> None:
        """Run the hook after the backward pass."""
        self.impl.init_post_backward_hook(self.ddp)()

    def step_ends(self) -> None:
        """Run the hook after the step, for each optimizer."""
        for optimizer in self.ddp.bagua_optimizers:
            self._after_step(optimizer)

    def settle(self) -> None:
        """Leave nothing under way."""
        self.ddp.backend.wait_pending_comm_ops()

    def forget(self) -> None:
        """Weights were put back: make buckets and operations anew before the next forward pass."""
        self._stale = True

    def _takes_means_of_all_gradients(self) -> bool:
        exchanged: set[int] = set()
        for bucket in self.ddp.bagua_buckets:
            if bucket.operations and all(isinstance(each, Centralized) for each in bucket.operations):
                exchanged |= {id(tensor) for tensor in bucket.tensors if _stands_for_gradient(tensor)}
        return bool(exchanged) and all(id(param) in exchanged for _, param in self.ddp.bagua_build_params())


def _stands_for_gradient(tensor: Any) -> bool:
    return isinstance(tensor, nn.Parameter) and effective_tensor(tensor) is tensor.grad


def _suggested(tensors: Sequence[Tensor], buckets: Sequence[Bucket]) -> list[list[Tensor]]:
    """Group neighbours that belong to one engine bucket, by name; of other names up to the default bucket size."""
    home = {name: bucket.index for bucket in buckets for name in bucket.names}
    limit, filled = default_bucket_bytes(), 0

    def keys() -> Iterator[tuple[Any, ...]]:
        nonlocal filled
        for tensor in tensors:
            record, now = record_of(tensor), effective_tensor(tensor)
            index = None if record is None else home.get(record.name)
            part = 0 if index is not None else filled // limit
            filled += now.nbytes if index is None else 0
            yield index is None, index if index is not None else part, now.dtype

    pairs = zip(keys(), tensors, strict=True)
    return [[tensor for _, tensor in group] for _, group in groupby(pairs, key=lambda pair: pair[0])]
