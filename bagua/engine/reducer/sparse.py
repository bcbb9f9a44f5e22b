"""Sparse gradients of embeddings: only the rows that some rank looked up are exchanged.

Legend: P = sparse parameters, R = ranks, K = rows with a gradient, D = elements of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Algorithm
from bagua.comm.collectives import all_gather_rows
from bagua.comm.groups import Group

__all__ = ["check_sparse", "exchange_sparse", "sparse_names"]


def sparse_names(module: nn.Module) -> set[str]:
    """Names of parameters that are used by embeddings with `sparse=True` and by nothing else."""
    holders: dict[int, list[bool]] = {}
    for part in module.modules():
        sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        for param in part.parameters(recurse=False):
            holders.setdefault(id(param), []).append(sparse)
    return {name for name, param in module.named_parameters() if all(holders[id(param)])}


def check_sparse(sparse: Mapping[str, nn.Parameter], algorithm: Algorithm, fallback: Algorithm | None) -> None:
    """Refuse algorithms that switch between gradients and weights.

    Raises:
        ValueError: names the algorithm.
    """
    payloads = algorithm.payloads | (fallback.payloads if fallback is not None else set())
    if sparse and len(payloads) > 1:
        raise ValueError(
            f"module: {next(iter(sparse))!r} has sparse gradients, and {algorithm!r} exchanges gradients first and "
            "weights later, or vice versa; call bagua.distribute() at the switch, or use sparse=False"
        )


@torch.no_grad()
def exchange_sparse(params: Mapping[str, nn.Parameter], group: Group, average: bool) -> None:
    """Make each `.grad` the sum over the ranks of its rows, or their mean; as it was where no rank has one.

    Bytes: (R-1) times those of the rank with most rows, 8 + D elements for each row.
    """
    grads = [_rows_of(param) for param in params.values()]
    counts_RP = torch.zeros(group.size, len(grads), dtype=torch.int64, device=next(iter(params.values())).device)
    counts_RP[group.rank] = counts_RP.new_tensor([grad._nnz() if grad is not None else 0 for grad in grads])
    all_gather_rows(group, counts_RP)
    counts = counts_RP.tolist()
    widths = [8 + param[0].numel() * param.element_size() for param in params.values()]
    for row in counts:
        if any(not 0 <= count <= len(param) for count, param in zip(row, params.values(), strict=True)):
            raise ValueError(f"sparse gradients: a rank sent {row} rows")
    nbytes = max(sum(count * width for count, width in zip(row, widths, strict=True)) for row in counts)
    wire_RW = torch.zeros(group.size, nbytes, dtype=torch.uint8, device=counts_RP.device)
    mine = [part.reshape(-1).view(torch.uint8) for grad in grads if grad is not None for part in _parts(grad)]
    if mine:
        packed = torch.cat(mine)
        wire_RW[group.rank, : packed.numel()] = packed
    all_gather_rows(group, wire_RW)
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in grads]
    for row_W, row in zip(wire_RW, counts, strict=True):
        offset = 0
        for number, (param, count, width) in enumerate(zip(params.values(), row, widths, strict=True)):
            found[number].append(_unpack(row_W[offset : offset + count * width], count, param))
            offset += count * width
    for param, parts in zip(params.values(), found, strict=True):
        if any(len(indices) for indices, _ in parts):
            values_KD = torch.cat([values for _, values in parts])
            indices_K = torch.cat([indices for indices, _ in parts])
            total = torch.sparse_coo_tensor(
                indices_K.unsqueeze(0), values_KD, param.shape, check_invariants=False
            ).coalesce()
            param.grad = total.div_(group.size) if average else total


def _rows_of(param: nn.Parameter) -> Tensor | None:
    grad = param.grad
    if grad is None:
        return None
    return (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()


def _parts(grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad.indices()[0].contiguous(), grad.values().contiguous()


def _unpack(wire: Tensor, count: int, param: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Indices [K] and values [K, ...] of one rank and parameter.

    Raises:
        ValueError: there is no such row.
    """
    # clone: the bytes may start at an offset that the dtype's alignment forbids
    indices_K = wire[: 8 * count].clone().view(torch.int64)
    values = wire[8 * count :].clone().view(param.dtype).view(count, *param.shape[1:])
    if count and not 0 <= int(indices_K.min()) <= int(indices_K.max()) < len(param):
        raise ValueError(f"sparse gradients: a rank sent row {int(indices_K.max())} of {len(param)}")
    return indices_K, values
