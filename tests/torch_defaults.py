"""Other defaults of torch, as scripts set them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["DTYPES", "default_dtype"]

DTYPES = (torch.float64, torch.bfloat16, torch.float16)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Of this process, in all threads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
