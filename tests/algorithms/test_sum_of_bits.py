"""Sums of bits: whether weights are what they were."""

from __future__ import annotations

import pytest
import torch

from bagua.algorithms.mean_moments import sum_of_bits

KINDS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("begin", range(5))
@pytest.mark.parametrize("num", [1, 2, 3, 7, 8, 9, 100])
def test_one_bit_changes_it(dtype: torch.dtype, begin: int, num: int) -> None:
    """Wherever a part begins in its storage."""
    x_N = torch.randn(200, generator=torch.Generator().manual_seed(1)).to(dtype)[begin : begin + num]
    whole, copy = int(sum_of_bits(x_N)), x_N.clone()
    bits = x_N.view(KINDS[dtype])
    for at in (0, num // 2, num - 1):
        bits[at] ^= 1
        assert int(sum_of_bits(x_N)) != whole
        bits[at] ^= 1
    assert int(sum_of_bits(x_N)) == whole
    assert torch.equal(x_N, copy)
