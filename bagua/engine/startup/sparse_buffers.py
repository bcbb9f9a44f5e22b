"""Sparse buffers, such as the adjacency of a graph: each rank keeps its own, and all are to hold the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["KIND", "REMEDY", "content_of", "is_sparse"]

KIND = "sparse buffer"
REMEDY = (
    "a sparse buffer is compared and not broadcast; give all ranks the same one, or leave it to each rank: put its "
    "name into module._bagua_params_and_buffers_to_ignore"
)
_ROWS, _COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)


def is_sparse(buffer: Tensor) -> bool:
    """Whether `content_of` knows the buffer's layout."""
    return buffer.layout is torch.sparse_coo or buffer.layout in _ROWS or buffer.layout in _COLUMNS


@torch.no_grad()
def content_of(buffer: Tensor) -> str:
    """Dtype, layout, number of elements and a digest, equal for equal sparse buffers."""
    parts = _parts(buffer.detach().cpu())
    made = hashlib.sha256()
    for part in parts:
        made.update(repr((tuple(part.shape), part.dtype)).encode())
        made.update(part.contiguous().view(-1).view(torch.uint8).numpy().data)
    kind = f"{buffer.dtype} {buffer.layout}".replace("torch.", "")
    return f"{kind} with {parts[-1].numel()} values, SHA-256 {made.hexdigest()[:16]}"


def _parts(buffer: Tensor) -> Sequence[Tensor]:
    """Indices and values; the last part holds the values."""
    if buffer.layout is torch.sparse_coo:
        buffer = buffer.coalesce()
        return buffer.indices(), buffer.values()
    if buffer.layout in _ROWS:
        return buffer.crow_indices(), buffer.col_indices(), buffer.values()
    return buffer.ccol_indices(), buffer.row_indices(), buffer.values()
