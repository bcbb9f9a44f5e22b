"""Argument checks of codecs; errors name the argument."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "FLOAT_DTYPES",
    "check_difference",
    "check_dtype",
    "check_fp32",
    "check_has_rows",
    "check_like",
    "check_part",
    "check_rows",
    "check_vector",
    "check_wire",
]

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_dtype(what: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless `dtype` is one of the four floating dtypes that codecs take."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{what} must be float32, float16, bfloat16 or float64, got {dtype}")


def check_rows(what: str, x_RN: Tensor) -> None:
    """Raise ValueError unless `x_RN` is [R, N], floating, with a contiguous last dim."""
    check_dtype(what, x_RN.dtype)
    if x_RN.dim() != 2:
        raise ValueError(f"{what} must have 2 dims [rows, elements], got shape {list(x_RN.shape)}")
    if x_RN.shape[1] > 1 and x_RN.stride(1) != 1:
        raise ValueError(f"{what} must be contiguous in its last dim, got strides {x_RN.stride()}")


def check_fp32(what: str, x_N: Tensor, n: int, device: torch.device) -> None:
    """Raise ValueError unless `x_N` is a contiguous fp32 [n] on `device`."""
    if x_N.dtype != torch.float32 or tuple(x_N.shape) != (n,) or x_N.device != device or not x_N.is_contiguous():
        raise ValueError(
            f"{what} must be a contiguous float32 [{n}] on {device}, got {x_N.dtype} {list(x_N.shape)} with strides "
            f"{x_N.stride()} on {x_N.device}"
        )


def check_wire(what: str, wire_RW: Tensor, rows: int | None, width: int, device: torch.device | None = None) -> None:
    """Raise ValueError unless `wire_RW` is uint8 [rows, width] with contiguous, 4-byte aligned rows."""
    if wire_RW.dtype != torch.uint8:
        raise ValueError(f"{what} must be uint8, got {wire_RW.dtype}")
    if wire_RW.dim() != 2 or wire_RW.shape[1] != width or (rows is not None and wire_RW.shape[0] != rows):
        expected = f"[{'R' if rows is None else rows}, {width}]"
        raise ValueError(f"{what} must be {expected} (see wire_bytes), got {list(wire_RW.shape)}")
    if device is not None and wire_RW.device != device:
        raise ValueError(f"{what} must be on {device}, got {wire_RW.device}")
    if width > 1 and wire_RW.stride(1) != 1:
        raise ValueError(f"{what} must be contiguous in its last dim, got strides {wire_RW.stride()}")
    if width and (wire_RW.storage_offset() % 4 or (wire_RW.shape[0] > 1 and wire_RW.stride(0) % 4)):
        raise ValueError(f"{what} must have rows that start 4-byte aligned")


def check_has_rows(what: str, wire_RW: Tensor) -> None:
    """Raise ValueError unless there is at least one row."""
    if wire_RW.shape[0] < 1:
        raise ValueError(f"{what} must have at least one row")


def check_vector(what: str, x_N: Tensor, n: int, device: torch.device) -> None:
    """Raise ValueError unless `x_N` is a contiguous [n] on `device`; its dtype is not looked at."""
    if tuple(x_N.shape) != (n,) or x_N.device != device or not x_N.is_contiguous():
        raise ValueError(
            f"{what} must be a contiguous [{n}] on {device}, got {list(x_N.shape)} with strides {x_N.stride()} on "
            f"{x_N.device}"
        )


def check_like(what: str, tensor: Tensor, like: str, other: Tensor) -> None:
    """Raise ValueError unless `tensor` has the shape, dtype and device of `other`, the argument called `like`."""
    if (tensor.shape, tensor.dtype, tensor.device) != (other.shape, other.dtype, other.device):
        raise ValueError(
            f"{what} must match {like}, {other.dtype} {list(other.shape)} on {other.device}, got {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}"
        )


def check_part(what: str, part_M: Tensor, wire_W: Tensor, start: int, n: int, align: int, width: int) -> None:
    """Raise ValueError unless a part of a row of `n` is fp32 and whole blocks of `align`, its wire uint8 [width].

    The last part of a row may end within a block.
    """
    m = part_M.numel()
    check_fp32(what, part_M, m, wire_W.device)
    if start < 0 or start % align or start + m > n or (m % align and start + m != n):
        raise ValueError(f"{what}: elements {start} to {start + m} of {n} are not whole blocks of {align}")
    if wire_W.dtype != torch.uint8 or wire_W.shape != (width,) or not wire_W.is_contiguous():
        raise ValueError(f"wire_W must be a contiguous [{width}] uint8, got {list(wire_W.shape)}")


def check_difference(x_N: Tensor, me_N: Tensor, peers_PN: Tensor, num_peers: int) -> None:
    """Raise ValueError unless the weights, their copy and those of `num_peers` peers fit each other."""
    check_rows("x_N", x_N[None])
    check_rows("peers_PN", peers_PN)
    for what, tensor, shape in (("me_N", me_N, x_N.shape), ("peers_PN", peers_PN, (num_peers, *x_N.shape))):
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != (tuple(shape), x_N.dtype, x_N.device):
            raise ValueError(
                f"{what} must be {x_N.dtype} {list(shape)} on {x_N.device}, got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}"
            )
    check_rows("me_N", me_N[None])
