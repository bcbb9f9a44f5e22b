"""What codecs make of zeros among other elements: algorithms clear rows that nobody uses where they are lost."""

from __future__ import annotations

import pytest
import torch

from bagua.codecs import Codec
from tests.codecs.conftest import CODECS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_keeps_zeros_says_whether_zeros_are_kept(codec: Codec, dtype: torch.dtype) -> None:
    x_RN = torch.randn(3, 5000, generator=torch.Generator().manual_seed(4))
    x_RN[:, ::3] = 0.0
    x_RN[1] = x_RN[1].abs()
    x_RN[2, 10:] = 0.0
    decoded = codec.decode(codec.encode(x_RN.to(dtype)), 5000, dtype=dtype)
    assert bool((decoded[x_RN == 0] == 0).all()) == codec.keeps_zeros
