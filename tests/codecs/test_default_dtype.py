"""`torch.set_default_dtype` changes nothing in what codecs compute."""

from __future__ import annotations

import pytest
import torch

from bagua.codecs import Codec, eden_torch
from tests.torch_defaults import DTYPES, default_dtype


@pytest.mark.usefixtures("backend")
def test_bytes_and_numbers(codec: Codec, make) -> None:
    x_RN, weight = make(2, 1025), 0.5
    wants, found = [], []
    for results, dtype in ((wants, torch.float32), *((found, dtype) for dtype in DTYPES)):
        with default_dtype(dtype):
            wire_RW = codec.encode(x_RN)
            residual_RN = torch.zeros_like(x_RN)
            fed_RW = codec.encode_with_feedback(x_RN, residual_RN)
            mean_N = codec.decode_mean(wire_RW, 1025, torch.empty_like(x_RN[0]), weight)
            results.append((wire_RW, codec.decode(wire_RW, 1025), mean_N, fed_RW, residual_RN))
    for other in found:
        assert all(torch.equal(mine, same) for mine, same in zip(wants[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_levels_of_eden(dtype: torch.dtype) -> None:
    """They are made when a backend is."""
    with default_dtype(dtype):
        made = eden_torch.EdenTorch(2, 1)
    assert torch.equal(made._centroids, eden_torch.EdenTorch(2, 1)._centroids)
