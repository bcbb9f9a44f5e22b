"""`BaguaBucket` of the original: tensors that are exchanged together, and the operations that do it.

A bucket of an algorithm written for Bagua 0.9 is made by its `tensors_to_buckets` and gets operations in its
`init_operations`. Buckets of other algorithms are made by the engine; `module.bagua_buckets` shows them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Bucket
from bagua.comm.groups import Groups
from bagua.torch_api.operations import (
    Centralized,
    Decentralized,
    LowPrecisionDecentralized,
    Operation,
    Python,
    check_compression,
)
from bagua.torch_api.tensor import Marker, effective_tensor, record_of

__all__ = ["Away", "BaguaBucket", "EngineBucket"]

Away = Sequence[tuple[Tensor, Tensor]]
"""Effective tensors that lie elsewhere than in the flat tensor, and their places in it."""


class BaguaBucket:
    """Tensors that are exchanged together, by the operations appended to the bucket, in order.

    Args:
        tensors: Bagua tensors (`ensure_bagua_tensor`) of one module, dtype and device.
        name: unique among the module's buckets.
        flatten: keep effective tensors that have a setter, such as gradients, in one flat tensor. False copies them to
            it for each exchange, and back. Tensors without a setter, such as weights, stay where they are.
        alignment: pad the flat tensor with zeros to a multiple of so many elements. Nothing here needs it.

    Attributes:
        tensors: as given.
        name, bagua_module_name: the bucket's and the module's.
        padding_tensor: the zeros at the end of the flat tensor, or None.
        operations: what was appended.
        scheduler: the module's `BaguaBackend`; None until the bucket is registered there.
        marked: ids of the tensors that are ready.

    Raises:
        ValueError: no tensors, or of several dtypes, devices or modules.
        TypeError: one is no Bagua tensor.
    """

    padding_tensor: Tensor | None = None

    def __init__(self, tensors: Sequence[Tensor], name: str, flatten: bool, alignment: int = 1) -> None:
        self.tensors, self.name, self.flatten = list(tensors), name, flatten
        if not self.tensors:
            raise ValueError(f"tensors: bucket {name!r} has none")
        records = [record_of(tensor) for tensor in self.tensors]
        if None in records:
            position = records.index(None)
            raise TypeError(f"tensors: number {position} of bucket {name!r} is no Bagua tensor; ensure_bagua_tensor()")
        modules = {record.module_name for record in records if record is not None}
        if len(modules) != 1:
            raise ValueError(f"tensors: bucket {name!r} has those of {len(modules)} modules: {modules}")
        self.bagua_module_name = modules.pop()
        effective = [effective_tensor(tensor) for tensor in self.tensors]
        kinds = {f"{each.dtype} on {each.device}" for each in effective}
        if len(kinds) != 1:
            raise ValueError(f"tensors: bucket {name!r} mixes {', '.join(sorted(kinds))}; make one bucket of each")
        numel = sum(each.numel() for each in effective)
        padding = -numel % max(alignment, 1)
        first = effective[0]
        self._shapes = [each.shape for each in effective]
        flat = None if padding else _common_memory(effective)
        self._flat = torch.zeros(numel + padding, dtype=first.dtype, device=first.device) if flat is None else flat
        if padding:
            self.padding_tensor = self._flat[numel:]
        self._views = _views(self._flat, self._shapes)
        self._away: Away = ()  # of the exchange that runs now
        self.operations: list[Operation] = []
        self.marked: set[int] = set()
        self.scheduler: Marker | None = None
        for record in records:
            assert record is not None
            record.bucket = weakref.ref(self)
        self.collect()

    # -- what scripts look at ------------------------------------------------------------------------------------

    @property
    def backend_bucket(self) -> BaguaBucket:
        """The bucket itself; the original returns an object of its Rust core."""
        return self

    @property
    def backend_tensor(self) -> Tensor | None:
        """The flat tensor, if the bucket is flattened."""
        return self._flat if self.flatten else None

    def flattened_tensor(self) -> Tensor:
        """A copy of all effective tensors and the padding, one after the other."""
        parts = [effective_tensor(tensor).detach().reshape(-1) for tensor in self.tensors]
        return torch.cat([*parts, *([] if self.padding_tensor is None else [self.padding_tensor])])

    def check_flatten(self) -> bool:
        """Whether the effective tensors lie in the flat tensor now."""
        pairs = zip(self.tensors, self._views, strict=True)
        return all(effective_tensor(tensor).data_ptr() == view.data_ptr() for tensor, view in pairs)

    def bytes(self) -> int:
        """Bytes of the effective tensors."""
        return sum(shape.numel() for shape in self._shapes) * self._flat.element_size()

    # -- operations ----------------------------------------------------------------------------------------------

    def clear_ops(self) -> BaguaBucket:
        """Remove all operations; returns the bucket."""
        self.operations.clear()
        return self

    def append_python_op(self, python_function: Callable[[str], Any], group: Any = None) -> None:
        """Call `python_function` with the bucket's name, on the lane: beside the training thread on CPUs.

        Args:
            python_function: may change the effective tensors, which it finds by `tensor.bagua_getter_closure()`.
            group: as in the other operations.
        """
        self.operations.append(Python(python_function, group))

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: Any = None,
    ) -> None:
        """Replace the effective tensors by their mean or sum over all ranks.

        Args:
            hierarchical: sum within each node first, in full precision.
            average: mean if true, else sum.
            scattergather: needed by `compression`; without it the result is that of the all-reduce.
            compression: None or "MinMaxUInt8": 8 bits and a range for each block of 1024 elements.
            group: the one given to `with_bagua`, or None for it; another one of the same ranks.

        Raises:
            ValueError: `compression` is unknown, or comes without `scattergather`.
        """
        if compression is not None:
            check_compression(compression)
            if not scattergather:
                raise ValueError(f"scattergather: compression={compression!r} needs scattergather=True")
        self.operations.append(Centralized(hierarchical, average, compression is not None, group))

    def append_decentralized_synchronous_op(
        self, peer_weight: Tensor, hierarchical: bool = True, peer_selection_mode: str = "all", group: Any = None
    ) -> Decentralized:
        """Put the mean of this rank's and its peers' effective tensors into `peer_weight`.

        Args:
            peer_weight: a Bagua tensor, flat, of the bucket's size: `bucket.flattened_tensor().ensure_bagua_tensor()`.
            hierarchical: mean within each node; peers are nodes.
            peer_selection_mode: "all" or "shift_one".
            group: as in `append_centralized_synchronous_op`.

        Returns:
            The operation. Its `copy_back_peer_weight(bucket)` copies the result to the effective tensors.

        Raises:
            ValueError: `peer_weight` has another size or dtype, or the mode is unknown.
        """
        operation = Decentralized(self._like("peer_weight", peer_weight), hierarchical, peer_selection_mode, group)
        self.operations.append(operation)
        return operation

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: Tensor,
        left_peer_weight: Tensor,
        right_peer_weight: Tensor,
        hierarchical: bool = True,
        compression: str = "MinMaxUInt8",
        group: Any = None,
    ) -> None:
        """Gossip with both neighbours on a ring: differences to replicas, in 8 bits.

        Args:
            weight: replica of this rank's tensors: flat, of the bucket's size, a Bagua tensor.
            left_peer_weight, right_peer_weight: replicas of the neighbours'.
            hierarchical: mean within each node; the ring joins nodes.
            compression: "MinMaxUInt8".
            group: as in `append_centralized_synchronous_op`.

        Raises:
            ValueError: a replica has another size or dtype, or `compression` is unknown.
        """
        check_compression(compression)
        replicas = (
            self._like("weight", weight),
            self._like("left_peer_weight", left_peer_weight),
            self._like("right_peer_weight", right_peer_weight),
        )
        self.operations.append(LowPrecisionDecentralized(*replicas, hierarchical, group))

    def append_asynchronous_model_average_op(self, peer_selection_mode: str = "all", group: Any = None) -> NoReturn:
        """Not offered.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "append_asynchronous_model_average_op: weights are not locked here; use AsyncModelAverageAlgorithm, or "
            "write a bagua.Algorithm that launches on ctx.background_lane()"
        )

    def _like(self, what: str, tensor: Tensor) -> Tensor:
        found = effective_tensor(tensor).detach()
        if found.numel() != self._flat.numel() or found.dtype != self._flat.dtype or not found.is_contiguous():
            raise ValueError(
                f"{what}: expected {self._flat.numel()} elements of {self._flat.dtype} without gaps, as "
                f"bucket.flattened_tensor() has, got {list(found.shape)} of {found.dtype}"
            )
        return found.view(-1)

    # -- for the scheduler and the operations --------------------------------------------------------------------

    @property
    def missing(self) -> list[str]:
        """Names of the tensors that are not marked."""
        return [tensor.bagua_tensor_name for tensor in self.tensors if id(tensor) not in self.marked]  # pyright: ignore

    @torch.no_grad()
    def collect(self) -> Away:
        """In the training thread: flatten what may be; returns what is copied for an exchange instead."""
        away: list[tuple[Tensor, Tensor]] = []
        for tensor, view in zip(self.tensors, self._views, strict=True):
            now, record = effective_tensor(tensor), record_of(tensor)
            if now.shape != view.shape:
                raise RuntimeError(
                    f"bucket {self.name!r}: tensor {record and record.name!r} had shape {list(view.shape)} when the "
                    f"bucket was made and has {list(now.shape)}; need_reset() makes buckets anew"
                )
            if now.data_ptr() == view.data_ptr() and now.stride() == view.stride():
                continue
            if self.flatten and record is not None and record.setter is not None:
                view.copy_(now)
                record.setter(tensor, view)
            else:
                away.append((now, view))
        return away

    @torch.no_grad()
    def execute(self, groups: Groups | None, away: Away) -> None:
        """On the lane: run the operations. `groups` is None for a single rank."""
        self._away = away
        for operation in self.operations:
            operation.run(self, groups)

    @torch.no_grad()
    def gather(self) -> Tensor:
        """The effective tensors as one, [N] with the padding."""
        for now, view in self._away:
            view.copy_(now)
        if self.padding_tensor is not None:
            self.padding_tensor.zero_()
        return self._flat

    @torch.no_grad()
    def scatter(self) -> None:
        """Take over what was done to the flat tensor."""
        for now, view in self._away:
            now.copy_(view)

    @torch.no_grad()
    def take_over(self, flat: Tensor) -> None:
        """Copy `flat` to the effective tensors, in the training thread."""
        for tensor, part in zip(self.tensors, _views(flat, self._shapes), strict=True):
            effective_tensor(tensor).copy_(part)


class EngineBucket(BaguaBucket):
    """A bucket of an algorithm of `bagua.algorithms`, to be looked at.

    Attributes:
        name: by its place in the order of exchange.
        names: of the parameters in it.
    """

    def __init__(self, core: Bucket) -> None:
        self._core = core
        self.name, self.flatten = f"bucket_{core.index}", True
        self.names: Sequence[str] = core.names
        self.params: Sequence[nn.Parameter] = core.params
        self.tensors = list(core.params)

    @property
    def flat(self) -> Tensor:
        """What is exchanged, gradients or weights, as one dimension."""
        return self._core.flat

    @property
    def backend_tensor(self) -> Tensor:
        """The same."""
        return self._core.flat

    def flattened_tensor(self) -> Tensor:
        """A copy of `flat`."""
        return self._core.flat.detach().clone()

    def check_flatten(self) -> bool:
        """True: what is exchanged always is one flat tensor."""
        return True

    def bytes(self) -> int:
        """Size of `flat`."""
        return self._core.flat.numel() * self._core.flat.element_size()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.name}: an algorithm of bagua.algorithms made this bucket, so no operations can be appended; make "
            "buckets in tensors_to_buckets() of an AlgorithmImpl, or write a bagua.Algorithm"
        )

    append_python_op = append_centralized_synchronous_op = append_decentralized_synchronous_op = _refuse
    append_low_precision_decentralized_synchronous_op = append_asynchronous_model_average_op = clear_ops = _refuse


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = flat[: sum(shape.numel() for shape in shapes)].split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _common_memory(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat tensor over the memory of all, if they lie side by side; None otherwise."""
    first = tensors[0].detach()
    at = first.data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.is_contiguous() and tensor.data_ptr() == at):
            return None
        at += tensor.numel() * tensor.element_size()
    numel = sum(tensor.numel() for tensor in tensors)
    return first.as_strided((numel,), (1,), first.storage_offset())
