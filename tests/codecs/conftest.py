"""Every codec, on every backend of this machine, on every device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bagua import codecs
from bagua.codecs import Codec, Eden
from bagua.codecs.blocks import BlockCodec
from bagua.codecs.registry import registry
from tests.contract.variants import variants

CODECS = tuple(codec for name in registry.builtin() for codec in variants(registry[name]))
BACKENDS = codecs.available_backends()
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported
BACKENDS_OF_TESTS = (*BACKENDS, "triton") if HAS_TRITON else BACKENDS
#: For what the compiled kernels of all instruction sets share, such as their threads: every day only the widest.
FEW_BACKENDS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in BACKENDS[1:-1] else []) for name in BACKENDS_OF_TESTS
]
DEVICES = ("cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []))


def skip_if_interpreter_fails() -> None:
    """For a test that needs Triton's interpreter."""
    from tests.codecs.triton_probe import interpreter_works

    if not interpreter_works():
        pytest.skip("this version of Triton's interpreter does not work with this numpy")


@pytest.fixture(params=CODECS, ids=repr)
def codec(request: pytest.FixtureRequest) -> Codec:
    """Every codec, with the options that change its layout."""
    return request.param


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors are."""
    return torch.device(request.param)


@pytest.fixture(params=BACKENDS_OF_TESTS)
def backend(request: pytest.FixtureRequest, device: torch.device) -> Iterator[str]:
    """Forces a backend. Without a GPU Triton's kernels run in its interpreter, on CPU tensors."""
    name = request.param
    if device.type != "cpu" and name.startswith("native"):
        pytest.skip("the compiled kernels are for CPU tensors")
    if name == "triton":
        if device.type == "cpu" and torch.cuda.is_available():
            pytest.skip("Triton's kernels run on the GPU here")
        if "codec" in request.fixturenames and not isinstance(request.getfixturevalue("codec"), BlockCodec):
            pytest.skip("this codec has no Triton kernels")
        if device.type == "cpu":
            skip_if_interpreter_fails()
        if device.type == "cpu" and isinstance(request.node.callspec.params.get("codec"), Eden):
            pytest.skip("Triton's interpreter takes minutes for rotations; test_triton.py has short rows")
        if device.type == "cpu" and request.node.get_closest_marker("not_interpreted"):
            pytest.skip("Triton's interpreter is not made for threads, and takes minutes for long rows")
    with codecs.use_backend(name), np.errstate(all="ignore"):  # the interpreter computes with numpy
        yield name


@pytest.fixture
def make(device: torch.device):
    """Random rows, the same in each test: ``make(rows, n, dtype)``."""

    def make(rows: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * rows + n)
        return torch.randn((rows, n), generator=generator).to(device, dtype)

    return make


def pytest_configure(config: pytest.Config) -> None:
    """Registers this folder's marker."""
    config.addinivalue_line("markers", "not_interpreted: too much for Triton's interpreter; on a GPU it runs")
