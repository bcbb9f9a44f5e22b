"""Triton's kernels beyond what the contract suite asks of every backend."""

# pyright: reportMissingImports=false
from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from bagua import codecs
from bagua.codecs import Codec, Eden, Int4, MinMaxUInt8, Sign, backends
from bagua.codecs.eden_torch import LAYOUTS

from .conftest import HAS_TRITON, skip_if_interpreter_fails

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.mark.skipif(HAS_TRITON, reason="Triton is installed")
def test_without_triton_there_is_a_reason():
    with pytest.raises(RuntimeError, match=r"'triton' cannot run here \(Triton is not installed\)"):
        with codecs.use_backend("triton"):
            raise AssertionError("not reached")


def test_cuda_tensors_without_triton_use_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.delenv(backends.ENV, raising=False)
    monkeypatch.setattr(backends, "_triton", lambda: (None, "Triton is not installed"))
    backends._on_cuda.cache_clear()
    try:
        for _ in range(2):
            assert codecs.backend("cuda") == "torch"
    finally:
        backends._on_cuda.cache_clear()
    (record,) = caplog.records
    assert "Triton is not installed" in record.getMessage()


@needs_triton
def test_cuda_tensors_use_triton(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(backends.ENV, raising=False)
    backends._on_cuda.cache_clear()
    assert codecs.backend("cuda") == "triton"
    with codecs.use_backend("torch"):
        assert codecs.backend("cuda") == "torch"
    monkeypatch.setenv(backends.ENV, "torch")
    backends._on_cuda.cache_clear()
    assert codecs.backend("cuda") == "torch"
    backends._on_cuda.cache_clear()


@needs_triton
@pytest.mark.parametrize("codec", [Sign(block=136), Int4(block=136), MinMaxUInt8(block=136)], ids=repr)
def test_scales_and_lost_blocks(codec: Codec, device: torch.device):
    skip_unless_kernels_run_on(device)
    for scale in (2.0**-149, 2.0**-130, 2.0**-101, 1.0, 3e38):  # the largest overflow
        check(codec, torch.randn((4, 1000), generator=torch.Generator().manual_seed(5)).to(device) * 8 * scale)


def skip_unless_kernels_run_on(device: torch.device) -> None:
    """On the GPU where there is one, else in the interpreter."""
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's kernels run on the GPU here")
    if device.type == "cpu":
        skip_if_interpreter_fails()


def check(codec: Codec, x: torch.Tensor, bad: bool = True) -> None:
    """All operations give the same bits as in eager torch."""
    n = x.shape[1]
    if bad:
        x[1, n * 3 // 10], x[2, n // 2] = float("nan"), -float("inf")
    results = []
    for name in ("torch", "triton"):
        with codecs.use_backend(name), np.errstate(all="ignore"):
            residual, once = x.flip(1).nan_to_num(0.0, 0.0, 0.0), x[3].nan_to_num(0.0, 0.0, 0.0)
            wire = codec.encode(x)
            y, mean = codec.decode(wire, n), codec.decode_mean(wire, n, torch.empty_like(x[0]), 0.3)
            fed = codec.encode_with_feedback(x, residual)
            again = codec.decode_mean_encode(wire, n, 0.3, once)
            numbers = [t.nan_to_num(nan=7.0).contiguous().view(torch.int32) for t in (y, mean, residual, once)]
            results.append((wire, fed, again, *numbers))
    for reference, ours in zip(*results, strict=True):
        assert torch.equal(reference, ours)


@needs_triton
@pytest.mark.parametrize("kind", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("n", [7, 75])
def test_rotated_blocks(kind: tuple[int, int], n: int, device: torch.device):
    """With a ragged block that is shorter than a byte, and one that is padded to half of a whole one."""
    skip_unless_kernels_run_on(device)
    codec = Eden(bits=kind[0], states=kind[1], block=32)
    x = torch.randn((4, n), generator=torch.Generator().manual_seed(n)).to(device)
    check(codec, x * 2.0**-120, bad=False)
    x[3] = -0.0
    check(codec, x)


_ONES = ("n", "num_blocks", "rows", "from_rows", "x_stride", "residual_stride", "out_stride")


@needs_triton
@pytest.mark.parametrize("codec", [Sign(block=136), Int4(block=136), MinMaxUInt8(block=136)], ids=repr)
def test_negative_zeros(codec: Codec, device: torch.device):
    skip_unless_kernels_run_on(device)
    x = torch.zeros((4, 1000), device=device)
    x[:, ::3] = -0.0
    check(codec, x, bad=False)
    x = torch.rand((4, 1000), generator=torch.Generator().manual_seed(7)).to(device)
    x[:, 500] = -1e-40  # a GPU may take a denormal number for 0
    check(codec, x, bad=False)


@needs_triton
@pytest.mark.slow
@pytest.mark.process
def test_kernels_compile_for_gpus_without_fused_multiply_add():
    """Needs no GPU: Triton brings its assembler. The interpreter must be off, so in a process of its own."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", "from tests.codecs.test_triton import compile_all; compile_all()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, env=env)
    assert done.returncode == 0, done.stderr


def compile_all() -> None:
    """Compiles each variant of each kernel for sm_90; asserts that it rounds each operation."""
    os.environ.pop("TRITON_INTERPRET", None)  # conftest.py, imported above, has set it again
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile  # type: ignore[attr-defined]

    from bagua.codecs import triton_eden, triton_int4, triton_minmax, triton_running_scale, triton_sign

    types = {"weight": "fp32", "x": "*fp32", "residual": "*fp32", "out": "*fp32", "factor": "fp32"}
    types |= {"from8": "*u8", "wire8": "*u8", "from32": "*fp32", "wire32": "*fp32", "rest_factor": "fp32"}
    types |= {"table": "*i32", "units": "*i32", "decisions": "*i32", "magnitude": "*fp32", "floors": "*fp32"}
    types |= {"to": "*fp32", "most": "*fp32", "of_rest": "fp32"}

    def build(kernel: Any, constants: dict[str, Any]) -> None:
        signature = {
            name: "constexpr" if name in constants else types.get(name, "i64" if "stride" in name else "i32")
            for name in kernel.arg_names
        }
        options = {"enable_fp_fusion": False, "num_warps": 4}
        built = compile(ASTSource(kernel, signature, constants), GPUTarget("cuda", 90, 32), options)
        assembly = built.asm["ptx"]
        assert not re.search(r"\bfma\.|(div|sqrt)\.(full|approx)|\.ftz", assembly), (kernel, constants)
        assert not re.search(r"(ld|st)\.local", assembly), "registers spill"

    for module, tile in ((triton_minmax, (2, 1024)), (triton_int4, (32, 64)), (triton_sign, (16, 2048))):
        for kernel, switches in ((module.encode, ("MEAN", "FEEDBACK")), (module.decode, ("MEAN",))):
            for *values, ones in itertools.product((False, True), repeat=len(switches) + 1):
                constants = dict(zip((*switches, "K", "B"), (*values, *tile), strict=True))
                if ones:  # a launch makes a constant of every integer that is 1: of a single row or a single element
                    constants |= {name: 1 for name in kernel.arg_names if name in _ONES}
                build(kernel, constants)
    for bits, states in LAYOUTS.values():
        sizes = {"BITS": bits, "STATES": states, "BLOCK": 256, "K": 8, "P": 256, "STAGES": 8}
        build(triton_eden.encode, {"MEAN": True, "FEEDBACK": True, **sizes})
        build(triton_eden.decode, {"MEAN": True, **sizes})
    for kernel in (triton_running_scale.means, triton_running_scale.divide, triton_running_scale.multiply):
        build(kernel, {"K": 8})
