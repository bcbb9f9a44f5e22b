"""`BaguaTensor` of the original: methods that this facade puts on `torch.Tensor`, for algorithms written for Bagua 0.9.

A Bagua tensor is a tensor that stands for what is exchanged, its *effective tensor*: itself by default, or what
`getter_closure` makes of it, such as a parameter's gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = [
    "BaguaTensor",
    "Marker",
    "Record",
    "ScheduledBucket",
    "effective_tensor",
    "ensure_gradient",
    "patch_tensor",
    "record_of",
]

Getter = Callable[[Tensor], Tensor]
Setter = Callable[[Tensor, Tensor], None]
_WITHOUT_BUCKET = (
    "is in no bucket that is scheduled: return it from init_tensors() and put it into a BaguaBucket in "
    "tensors_to_buckets(), or write the algorithm as a bagua.Algorithm, which launches exchanges itself"
)


class Marker(Protocol):
    """A scheduler, as tensors and buckets know it: see `BaguaBackend`."""

    def mark_communication_ready(self, tensor: Tensor, ready_cuda_event: int = 0) -> None:
        """Mark a tensor."""
        ...


class ScheduledBucket(Protocol):
    """A bucket, as its tensors know it: see `BaguaBucket`."""

    scheduler: Marker | None


@dataclass(eq=False)
class Record:
    """What a tensor was registered with. Copies and pickles of the tensor are plain tensors.

    Attributes:
        name, module_name: as given.
        getter, setter: the closures, or None.
        bucket: a weak reference to the bucket in which the tensor was put last, or None.
    """

    name: str
    module_name: str | None
    getter: Getter | None
    setter: Setter | None
    bucket: weakref.ref[Any] | None = None

    def __reduce__(self) -> Any:
        return str, ()  # "" in a pickle, which then needs neither this package nor picklable closures

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def record_of(tensor: Any) -> Record | None:
    """Return what `tensor` was registered with; None if it is no Bagua tensor."""
    record = getattr(tensor, "_bagua_record", None)
    return record if isinstance(record, Record) else None


def _known(tensor: Tensor) -> Record:
    record = record_of(tensor)
    if record is None:
        raise AttributeError("this is no Bagua tensor; call its ensure_bagua_tensor() first")
    return record


def effective_tensor(tensor: Tensor) -> Tensor:
    """Return what is exchanged in the place of `tensor`; a parameter without a gradient gets one of zeros.

    Raises:
        AttributeError: it is no Bagua tensor.
        TypeError: the getter returns no tensor.
        NotImplementedError: it is sparse.
    """
    record = _known(tensor)
    found = tensor if record.getter is None else record.getter(tensor)
    if found is None and isinstance(tensor, nn.Parameter) and record.getter is not None:
        ensure_gradient(tensor)
        found = record.getter(tensor)
    if not isinstance(found, Tensor):
        raise TypeError(f"tensor {record.name!r}: getter_closure returned {type(found).__name__}, not a tensor")
    if found.layout is not torch.strided:
        raise NotImplementedError(
            f"tensor {record.name!r} is {found.layout}: algorithms written for Bagua 0.9 exchange dense tensors; use "
            "sparse=False, or an algorithm of bagua.algorithms that exchanges gradients"
        )
    return found


def ensure_gradient(tensor: Tensor) -> None:
    """Give a parameter without a gradient one of zeros.

    Raises:
        NotImplementedError: `tensor` is no parameter.
    """
    if tensor.grad is None:
        if not isinstance(tensor, nn.Parameter):
            raise NotImplementedError("bagua_ensure_grad: only a torch.nn.Parameter is given a gradient")
        tensor.grad = torch.zeros_like(tensor, requires_grad=False)


class BaguaTensor:
    """The methods. `patch_tensor` puts those whose name contains "bagua" on `torch.Tensor`."""

    def is_bagua_tensor(self) -> bool:
        """Whether `ensure_bagua_tensor` was called on it."""
        return record_of(self) is not None

    def ensure_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> Any:
        """Register this tensor, in place, and return it.

        Args:
            name: unique in the module; "" by default.
            module_name: a label, `model.bagua_module_name`.
            getter_closure: maps the tensor to what is exchanged in its place. Default: the tensor itself.
            setter_closure: called with the tensor and another one, which is to be exchanged from then on.

        Raises:
            ValueError: it is registered under another name already, or has a setter without a getter.
            TypeError: a name that is no string.
        """
        tensor: Any = self
        for option, value in (("name", name), ("module_name", module_name)):
            if not isinstance(value, str | None):
                raise TypeError(f"{option}: expected a string or None, got {type(value).__name__}")
        if setter_closure is not None and getter_closure is None:
            raise ValueError("setter_closure: goes with a getter_closure, which is None")
        record = record_of(tensor)
        if record is not None and name is not None and (record.name, record.module_name) != (name, module_name):
            raise ValueError(
                f"name: the tensor is registered as {record.name!r} of {record.module_name!r} already, "
                f"got {name!r} of {module_name!r}"
            )
        if record is not None and name is None:
            name, module_name = record.name, record.module_name
        tensor._bagua_record = Record(name or "", module_name, getter_closure, setter_closure)
        effective_tensor(tensor)
        return tensor

    def to_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> Any:
        """Register and return a new tensor that shares this one's memory; see `ensure_bagua_tensor`."""
        tensor: Any = self
        return tensor.detach().view(tensor.dtype).ensure_bagua_tensor(name, module_name, getter_closure, setter_closure)

    @property
    def bagua_tensor_name(self) -> str:
        """The name given."""
        return _known(self).name  # pyright: ignore[reportArgumentType]

    @property
    def bagua_module_name(self) -> str | None:
        """The module's name given."""
        return _known(self).module_name  # pyright: ignore[reportArgumentType]

    @property
    def bagua_backend(self) -> Any:
        """What schedules the tensor's bucket; None while it is in none."""
        bucket = _bucket_of(_known(self))  # pyright: ignore[reportArgumentType]
        return None if bucket is None else bucket.scheduler

    def bagua_getter_closure(self) -> Tensor:
        """Return the effective tensor."""
        return effective_tensor(self)  # pyright: ignore[reportArgumentType]

    def bagua_setter_closure(self, tensor: Tensor) -> None:
        """Make `tensor` the effective tensor.

        Raises:
            ValueError: no `setter_closure` was given.
        """
        me: Any = self
        record = _known(me)
        if record.setter is None:
            raise ValueError(f"tensor {record.name!r} was registered without a setter_closure")
        record.setter(me, tensor)

    def bagua_backend_tensor(self) -> Tensor:
        """Return the effective tensor; the original returns an object of its Rust core that points to it."""
        return effective_tensor(self)  # pyright: ignore[reportArgumentType]

    def bagua_ensure_grad(self) -> Any:
        """Give a parameter without a gradient one of zeros; returns the parameter.

        Raises:
            NotImplementedError: this is no parameter.
        """
        ensure_gradient(self)  # pyright: ignore[reportArgumentType]
        return self

    def bagua_mark_communication_ready(self) -> None:
        """Say that the effective tensor may be exchanged: its bucket is, when all of its tensors are marked.

        Raises:
            RuntimeError: it is in no bucket, or is marked again before the bucket was exchanged.
        """
        me: Any = self
        record = _known(me)
        bucket = _bucket_of(record)
        if bucket is None or bucket.scheduler is None:
            raise RuntimeError(f"tensor {record.name!r} {_WITHOUT_BUCKET}")
        bucket.scheduler.mark_communication_ready(me)

    def bagua_mark_communication_ready_without_synchronization(self) -> None:
        """As `bagua_mark_communication_ready`: the lane orders itself behind what the current CUDA stream has done."""
        tensor: Any = self
        tensor.bagua_mark_communication_ready()

    @torch.no_grad()
    def bagua_set_storage(self, storage: Any, storage_offset: int = 0) -> None:
        """Let the effective tensor lie in `storage`, in which its values are then found.

        Args:
            storage: an `UntypedStorage`, or a storage with a type.
            storage_offset: elements before it.
        """
        me: Any = self
        record, now = _known(me), effective_tensor(me)
        untyped: Any = storage if isinstance(storage, torch.UntypedStorage) else storage.untyped()
        moved: Any = torch.empty(0, dtype=now.dtype, device=now.device)
        moved.set_(untyped, storage_offset, now.shape)
        if record.setter is None:
            now.data = moved
        else:
            record.setter(me, moved)

    bagua_set_registered_storage = bagua_set_storage


def _bucket_of(record: Record) -> ScheduledBucket | None:
    return None if record.bucket is None else record.bucket()


def patch_tensor() -> None:
    """Put the methods on `torch.Tensor`."""
    target: Any = Tensor
    for name, member in vars(BaguaTensor).items():
        if "bagua" in name:
            setattr(target, name, member)
