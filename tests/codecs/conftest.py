"""Every codec, on every backend of this machine, on every device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bagua import codecs
from bagua.codecs import Bf16, Codec, Fp16, Identity, Int4, MinMaxUInt8, Sign, TopK

CODECS = (
    Identity(),
    Bf16(),
    Fp16(),
    MinMaxUInt8(),
    MinMaxUInt8(block=96),
    MinMaxUInt8(block=None),
    Int4(),
    Int4(block=94),
    Sign(),
    Sign(block=88),
    TopK(ratio=0.02),
    TopK(ratio=0.1, block=96),
)
BACKENDS = codecs.available_backends()
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@pytest.fixture(params=CODECS, ids=repr)
def codec(request: pytest.FixtureRequest) -> Codec:
    """Every codec, with the options that change its layout."""
    return request.param


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors are."""
    return torch.device(request.param)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, device: torch.device) -> Iterator[str]:
    """Forces a backend of CPU tensors; other devices have one path only, tested once."""
    if device.type != "cpu" and request.param != "torch":
        pytest.skip("the compiled kernels are for CPU tensors")
    with codecs.use_backend(request.param):
        yield request.param


@pytest.fixture
def make(device: torch.device):
    """Random rows, the same in each test: ``make(rows, n, dtype)``."""

    def make(rows: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * rows + n)
        return torch.randn((rows, n), generator=generator).to(device, dtype)

    return make
