"""`BaguaBucket` of the original, to be looked at: `module.bagua_buckets` holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from bagua.algorithms.base import Bucket

__all__ = ["BaguaBucket"]

_INSTEAD = "a subclass of bagua.Algorithm decides in on_ready() what a bucket does"


class BaguaBucket:
    """A bucket of a distributed module. Made by the engine only.

    Attributes:
        name: by its place in the order of exchange.
        names: of the parameters in it.
        padding_tensor: None; buckets have no padding.

    Raises:
        NotImplementedError: it is made by a script.
    """

    padding_tensor: None = None

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"BaguaBucket: buckets are made by the engine; {_INSTEAD}")

    @classmethod
    def of(cls, core: Bucket) -> BaguaBucket:
        """The engine's bucket by the original's names."""
        bucket = cls.__new__(cls)
        bucket._core = core
        return bucket

    _core: Bucket

    @property
    def name(self) -> str:
        """bucket_0 and so on."""
        return f"bucket_{self._core.index}"

    @property
    def names(self) -> Sequence[str]:
        """Of the parameters."""
        return self._core.names

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """The parameters in it."""
        return self._core.params

    @property
    def tensors(self) -> list[nn.Parameter]:
        """The parameters in it, in a list."""
        return list(self._core.params)

    @property
    def flat(self) -> Tensor:
        """What is exchanged, gradients or weights, as one dimension."""
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
        raise NotImplementedError(f"BaguaBucket: operations cannot be appended to a bucket; {_INSTEAD}")

    append_python_op = append_centralized_synchronous_op = append_decentralized_synchronous_op = _refuse
    append_low_precision_decentralized_synchronous_op = append_asynchronous_model_average_op = clear_ops = _refuse
