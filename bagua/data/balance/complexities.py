"""Complexities: the cost of each sample."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_complexities", "complexities", "fingerprint"]

_FORMAT = 1


def complexities(
    dataset: Any, complexity_fn: Callable[[Any], float], *, cache: str | os.PathLike[str] | None = None, key: str = ""
) -> Tensor:
    """Return `complexity_fn(dataset[i])` for all i: [N] fp64, on the CPU.

    Args:
        dataset: has a length and is indexed by integers.
        complexity_fn: a sample to a number: its length, say.
        cache: a file to read them from, or to write them to when it does not exist or is not about this dataset.
            Ranks may share it.
        key: what tells this dataset and function from others of the same length; part of the file.

    Raises:
        ValueError: a complexity is not a finite number; names the sample. Or the dataset is empty.
        TypeError: the dataset has no length, or `complexity_fn` cannot be called.

    Examples:
        >>> bagua.data.complexities(["a", "to be", "or"], len)
        tensor([1., 5., 2.], dtype=torch.float64)
    """
    if not callable(complexity_fn):
        raise TypeError(f"complexity_fn: expected a function, got {type(complexity_fn).__name__}")
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"dataset: {type(dataset).__name__} has no length")
    if cache is not None:
        values = _read(Path(cache), len(dataset), key)
        if values is not None:
            return values
    values = as_complexities([complexity_fn(dataset[index]) for index in range(len(dataset))], "complexity_fn")
    if cache is not None:
        _write(Path(cache), values, key)
    return values


def as_complexities(values: Sequence[float] | Tensor | Any, name: str) -> Tensor:
    """`values` (a list, an array or a tensor) as [N] fp64 on the CPU.

    Raises:
        ValueError: empty, not of one dimension, or with something that is not a finite number; names `name`.
        TypeError: not numbers.
    """
    try:
        made = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a number for each sample ({error})") from None
    if made.ndim != 1:
        raise ValueError(f"{name}: expected one number for each sample, got shape {list(made.shape)}")
    if made.numel() == 0:
        raise ValueError(f"{name}: expected at least one sample, got none")
    bad = (~made.isfinite()).nonzero()
    if len(bad):
        at = int(bad[0])
        raise ValueError(f"{name}: expected finite numbers, got {made[at].item()} for sample {at}")
    return made


def fingerprint(values: Tensor) -> str:
    """Fingerprint of an [N] fp64 tensor, independent of the number of threads; not cryptographic."""
    bits = values.contiguous().view(torch.int64)
    odd = torch.arange(len(bits), device=bits.device) * 2 + 1
    return f"{len(bits)}-{int(bits.sum()) & (2**64 - 1):016x}-{int((bits * odd).sum()) & (2**64 - 1):016x}"


def _read(path: Path, count: int, key: str) -> Tensor | None:
    """Read the cached complexities; None if they are missing or do not match."""
    try:
        stored = torch.load(path, weights_only=True)
    except FileNotFoundError:
        return None
    except Exception:  # torch names no set of errors for a file that is cut off or something else
        return None
    if not isinstance(stored, dict) or (stored.get("format"), stored.get("key")) != (_FORMAT, key):
        return None
    values = stored.get("values")
    if not isinstance(values, Tensor) or values.dtype != torch.float64 or values.shape != (count,):
        return None
    return values if stored.get("fingerprint") == fingerprint(values) else None


def _write(path: Path, values: Tensor, key: str) -> None:
    """Write atomically: another rank reads the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save({"format": _FORMAT, "key": key, "fingerprint": fingerprint(values), "values": values}, file)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
