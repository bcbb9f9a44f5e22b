"""`CachedDataset`: a dataset whose samples are computed once."""

from __future__ import annotations

import gc
import operator
import pickle
import weakref
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, ClassVar

from torch.utils.data import Dataset, IterableDataset

from bagua.data.cache.cache_loader import CacheLoader, CacheStats
from bagua.data.cache.client import claim, forget_claims
from bagua.data.cache.outline import outline_of
from bagua.data.cache.store import StoreError

__all__ = ["CachedDataset"]

_made: weakref.WeakSet[CachedDataset] = weakref.WeakSet()


class CachedDataset(Dataset[Any]):
    """Dataset whose samples are cached once they were computed.

    `dataset` should do only work that is the same in every epoch; apply random augmentation afterwards, because the
    first result is cached. The samples of a DataLoader's batch are requested together.

    Args:
        dataset: anything with `__getitem__`; `__len__` and `__getitems__` are passed on if it has them.
        backend: "lmdb", "memory" or "redis".
        dataset_name, capacity_per_node, writer_buffer_size, serializer, **backend_options: see CacheLoader.

    Raises:
        TypeError: `dataset` cannot be indexed; else as CacheLoader.
        ValueError: another dataset of this process uses `dataset_name` in the same store, or has used it; else as
            CacheLoader.

    Examples:
        >>> squares = torch.utils.data.TensorDataset(torch.arange(8.0).square())
        >>> cached = bagua.data.CachedDataset(squares, "memory")
        >>> cached[3]
        (tensor(9.),)
    """

    loader_class: ClassVar[type[CacheLoader]] = CacheLoader

    def __init__(
        self,
        dataset: Any,
        backend: str = "lmdb",
        dataset_name: str = "",
        capacity_per_node: int | None = None,
        writer_buffer_size: int = 20,
        *,
        serializer: str = "plain",
        **backend_options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"dataset: expected one with __getitem__, got {type(dataset).__name__}")
        self.dataset = dataset
        self.cache_loader = self.loader_class(
            backend, dataset_name, capacity_per_node, writer_buffer_size, serializer=serializer, **backend_options
        )
        self._claim_name()

    def __getitem__(self, index: Any) -> Any:
        return self.cache_loader.get(_key(index), self.dataset.__getitem__)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return the samples of a batch."""
        return self.cache_loader.get_many([_key(index) for index in indices], self._compute)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def stats(self) -> CacheStats:
        """Hits and misses of this process; DataLoader workers count their own."""
        return self.cache_loader.stats

    def flush(self) -> None:
        """Wait until what this process computed is written."""
        self.cache_loader.flush()

    def close(self) -> None:
        """Write what is pending and close the store; see CacheLoader.close."""
        self.cache_loader.close()

    def _claim_name(self) -> None:
        """Refuse a name under which another dataset's samples would be returned."""
        mine = self.cache_loader
        if self._others():
            gc.collect()  # one that only a cycle keeps alive is not in use
            if self._others():
                raise ValueError(
                    f"dataset_name: {mine.dataset_name!r} is in use for another dataset in the same "
                    "store, so each would return the other's samples; give each dataset a dataset_name of its own"
                )
        outline = outline_of(self.dataset)
        if claim(mine.backend, mine.dataset_name, outline) != outline and self._holds_samples():
            raise ValueError(
                f"dataset_name: {mine.dataset_name!r} was used in this process for another dataset, whose samples are "
                "still in the store and would be returned; give each dataset a dataset_name of its own, as "
                "f'fold {k}', or remove the samples with cache_loader.clear() of the dataset before"
            )
        _made.add(self)

    def _holds_samples(self) -> bool:
        """Whether the store has entries; if not, nobody has a claim on its names."""
        try:
            if self.cache_loader.num_keys():
                return True
        except StoreError:
            return True
        forget_claims(self.cache_loader.backend)
        claim(self.cache_loader.backend, self.cache_loader.dataset_name, outline_of(self.dataset))
        return False

    def _others(self) -> bool:
        """Whether a different dataset has the same name and store."""
        mine = self.cache_loader
        return any(
            each.cache_loader.dataset_name == mine.dataset_name
            and each.cache_loader.backend == mine.backend
            and not _same(each.dataset, self.dataset)
            for each in _made
        )

    def _compute(self, keys: list[Any]) -> Sequence[Any]:
        if callable(getattr(self.dataset, "__getitems__", None)):
            return self.dataset.__getitems__(keys)
        return [self.dataset[key] for key in keys]


def _key(index: Any) -> str | int | bytes:
    """Numbers of any kind, one-element tensors among them, are one key."""
    if isinstance(index, (str, bytes)):
        return index
    try:
        return operator.index(index)
    except TypeError:
        raise TypeError(f"index: expected an integer, str or bytes, got {type(index).__name__}") from None


class _Digest:
    """A file to pickle to that keeps only a hash, as a dataset may be large."""

    def __init__(self) -> None:
        self._hash = blake2b()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return len(data)

    def value(self) -> bytes:
        return self._hash.digest()


def _same(one: Any, other: Any) -> bool:
    """Whether they are one dataset, or equal ones as far as pickling shows."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    digests = _Digest(), _Digest()
    try:
        for digest, dataset in zip(digests, (one, other), strict=True):
            pickle.dump(dataset, digest, pickle.HIGHEST_PROTOCOL)
    except Exception:  # whatever a dataset of any kind raises when it cannot be pickled
        return False
    return digests[0].value() == digests[1].value()
