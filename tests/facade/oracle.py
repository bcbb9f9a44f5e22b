"""What each primitive must do, in numpy: from everyone's inputs to everyone's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8)
INTEGERS = (torch.int64, torch.uint8)
COUNT = 5  # elements of one part


def random_tensor(rng: np.random.Generator, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers so small that sums and products of four are exact in every floating dtype."""
    low, high = (0, 256) if dtype == torch.uint8 else (-4, 5)
    return torch.from_numpy(rng.integers(low, high, numel)).to(dtype)


def inputs(n: int, numel: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Everyone's inputs, the same on all ranks."""
    rng = np.random.default_rng([n, numel, seed, DTYPES.index(dtype)])
    return [random_tensor(rng, numel, dtype) for _ in range(n)]


def as_array(x: torch.Tensor) -> np.ndarray:
    """Integers as they are, floats in float64."""
    return x.cpu().numpy() if x.dtype in INTEGERS else x.cpu().double().numpy()


def reduced(arrays: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Reduce over ranks, in the arrays' own width but for the mean."""
    stack = np.stack(arrays)
    if op == "AVG":
        if stack.dtype.kind == "f":
            return stack.mean(0)
        return np.trunc(stack.astype(np.int64).sum(0) / len(arrays)).astype(stack.dtype)
    ufunc: Any = {
        "SUM": np.add,
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BOR": np.bitwise_or,
        "BAND": np.bitwise_and,
        "BXOR": np.bitwise_xor,
    }[op]
    return ufunc.reduce(stack, axis=0, dtype=stack.dtype)


def check(what: str, got: torch.Tensor, want: np.ndarray) -> None:
    """Bit-equal, or within one rounding of the dtype where a mean is not whole."""
    array = as_array(got)
    if got.dtype in INTEGERS:
        assert array.dtype == want.dtype, what
        assert np.array_equal(array, want), f"{what}: got {array}, want {want}"
    else:
        assert np.allclose(array, want, rtol=torch.finfo(got.dtype).eps, atol=0), f"{what}: got {array}, want {want}"
