"""Devices on which two ranks can use the backend."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import _devices
from tests.rank_pool import may_use_nccl


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is; NCCL, which carries CUDA tensors, needs a GPU for each rank."""
    chosen = torch.device(request.param)
    if chosen.type == "cuda" and not may_use_nccl(2):
        pytest.skip("NCCL refuses ranks that share a GPU")
    return chosen
