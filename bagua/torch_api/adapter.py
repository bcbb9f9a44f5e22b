"""Runs algorithms written for Bagua 0.9 (`Algorithm.reify`, `AlgorithmImpl`) as one `bagua.Algorithm`.

Parameters lie in the engine's buckets, gradients where autograd put them. Once all gradients of an engine bucket are
there, the backward hook runs for each of its parameters, in the same order on all ranks, so that no parameter without
a gradient holds up an exchange. One lane runs the operations of the algorithm's buckets, first in first out.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness, Payload
from bagua.engine.reducer.sparse import sparse_names
from bagua.exchanges import AllReduce
from bagua.torch_api.adapter_session import AdapterSession

__all__ = ["AdaptedAlgorithm", "adapt"]

_Plain = bool | int | float | str | None


@dataclass(frozen=True)
class AdaptedAlgorithm(Algorithm):
    """An algorithm written for Bagua 0.9. Made by `with_bagua`, for one module.

    It promises nothing, so replicas count as different unless it does nothing but exchange all gradients.

    Args:
        algorithm: its class and plain options, which ranks compare.
    """

    name: ClassVar[str] = "written_for_bagua_0_9"
    summary: ClassVar[str] = "an algorithm written for Bagua 0.9, through its adapter"
    exactness: ClassVar[Exactness] = Exactness.DECENTRALIZED
    payload_kind: ClassVar[Payload] = Payload.PARAM

    algorithm: str
    session: AdapterSession = field(repr=False, compare=False)

    @property
    def uneven(self) -> str:
        """What a rank without inputs would do is not known."""
        return "algorithms written for Bagua 0.9 cannot do without a rank"

    @property
    def hierarchical_groups(self) -> bool:
        """True: `init_operations` may ask for any."""
        return True

    def bytes_per_rank(self, n: int, size: int) -> float:
        """That of an all-reduce; the algorithm does not say."""
        return AllReduce().bytes_per_rank(n, size)

    def check(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse sparse gradients, as the original."""
        sparse = sparse_names(self.session.ddp.module)
        if sparse:
            raise ValueError(
                f"module: {min(sparse)!r} has sparse gradients, which {self.algorithm} cannot exchange; use "
                "sparse=False, or an algorithm of bagua.algorithms that exchanges gradients"
            )

    def replicas_differ(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Unless it does nothing but exchange all gradients."""
        return not self.session.exchanges_gradients

    def shares_gradients(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """If it does nothing but exchange all gradients."""
        return self.session.exchanges_gradients

    def setup(self, ctx: Context) -> None:
        """Reify it, and make its tensors, buckets and operations."""
        self.session.set_up(ctx)

    def on_forward(self, ctx: Context) -> None:
        """Its hook runs with the module's inputs, see `adapt`."""
        self.session.step_begins()

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        """Its backward hook, for each parameter."""
        self.session.gradients_ready(bucket)

    def on_backward_end(self, ctx: Context) -> None:
        """Its hook after the backward pass."""
        self.session.backward_ends()

    def on_step_end(self, ctx: Context) -> None:
        """Its hook after the step, for each optimizer."""
        self.session.step_ends()

    def on_pause(self, ctx: Context) -> None:
        """Wait for what is under way."""
        self.session.settle()

    def on_load(self, ctx: Context) -> None:
        """Its state is not saved, as in the original: begin anew."""
        self.session.forget()


# Beside the modules and not on them, so that copies and pickles of a module are plain modules.
_sessions: weakref.WeakKeyDictionary[nn.Module, tuple[AdapterSession, Any]] = weakref.WeakKeyDictionary()


def adapt(
    algorithm: Any,
    module: nn.Module,
    module_name: str,
    optimizers: Sequence[torch.optim.Optimizer],
    process_group: Any,
    do_flatten: bool,
) -> AdaptedAlgorithm:
    """Return a `bagua.Algorithm` for `module` that does what `algorithm`, with its `reify`, says.

    Args:
        process_group: a `BaguaProcessGroup`.
        do_flatten: as in `with_bagua`.
    """
    session = AdapterSession(algorithm, module, module_name, optimizers, process_group, do_flatten)
    return AdaptedAlgorithm(_describe(algorithm), session)


def attach_session(module: nn.Module, adapted: AdaptedAlgorithm | None) -> None:
    """Call the algorithm's forward hook with the module's inputs from now on; None: that of no algorithm."""
    before = _sessions.pop(module, None)
    if before is not None:
        before[1].remove()
    if adapted is not None:
        _sessions[module] = (adapted.session, module.register_forward_pre_hook(_before_forward))


def _before_forward(module: nn.Module, inputs: Any) -> None:
    if torch.compiler.is_compiling() or not module.training:
        return
    entry = _sessions.get(module)
    if entry is not None:
        entry[0].before_forward(inputs)


def _describe(algorithm: Any) -> str:
    """Class and plain options, for the comparison between ranks."""
    kind = type(algorithm)
    plain = {name: value for name, value in sorted(vars(algorithm).items()) if isinstance(value, _Plain)}
    return f"{kind.__module__}.{kind.__qualname__}({', '.join(f'{name}={value!r}' for name, value in plain.items())})"
