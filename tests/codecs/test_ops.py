"""The operators of torch: what they compute, and that torch's own checks of them pass."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from torch.library import opcheck

import bagua.codecs.ops
from bagua import codecs
from bagua.codecs import Codec
from bagua.codecs.registry import registry
from tests.contract.variants import variants

# Of each codec the options of the second of its variants, if there is one.
CODECS = {name: variants(registry[name])[:2][-1] for name in registry.builtin()}
OPTIONS = {name: astuple(codec) for name, codec in CODECS.items()}
N = 301


def operator(name: str, what: str):
    return getattr(torch.ops.bagua, f"{name}_{what}").default


def codec_of(name: str) -> Codec:
    return CODECS[name]


def calls(name: str, device: torch.device):
    """Each operator of a codec with arguments for it."""
    x, options = torch.randn((2, N), generator=torch.Generator().manual_seed(1)).to(device), OPTIONS[name]
    wire = codec_of(name).encode(x).clone()
    return {
        "encode": (x, *options),
        "decode": (wire, N, torch.float32, *options),
        "decode_mean": (wire, N, 0.5, *options),
        "encode_with_feedback": (x, x.flip(0) * 0.3, *options),
        "decode_mean_encode": (wire, N, 0.5, x[0] * 0.3, *options),
    }


def test_every_codec_has_operators():
    assert {make.name for make in bagua.codecs.ops.OPTIONS} == set(codecs.available(builtin_only=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OPTIONS)
def test_operators_do_what_the_codec_does(name: str, device: torch.device):
    codec, arguments = codec_of(name), calls(name, device)
    x, wire = arguments["encode"][0], arguments["decode"][0]
    assert torch.equal(operator(name, "encode")(*arguments["encode"]), codec.encode(x))
    assert torch.equal(operator(name, "decode")(*arguments["decode"]), codec.decode(wire, N))
    mean = codec.decode_mean(wire, N, torch.empty(N, device=device), 0.5)
    assert torch.equal(operator(name, "decode_mean")(*arguments["decode_mean"]), mean)

    residual = arguments["encode_with_feedback"][1]
    expected = residual.clone()
    wire_RW = codec.encode_with_feedback(x, expected)
    assert torch.equal(operator(name, "encode_with_feedback")(*arguments["encode_with_feedback"]), wire_RW)
    assert torch.equal(residual, expected)

    residual = arguments["decode_mean_encode"][3]
    expected = residual.clone()
    wire_1W = codec.decode_mean_encode(wire, N, 0.5, expected)
    assert torch.equal(operator(name, "decode_mean_encode")(*arguments["decode_mean_encode"]), wire_1W)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("what", ["encode", "decode", "decode_mean", "encode_with_feedback", "decode_mean_encode"])
def test_opcheck(name: str, what: str, device: torch.device):
    results = opcheck(operator(name, what), calls(name, device)[what])
    assert set(results.values()) == {"SUCCESS"}


def test_defaults_are_those_of_the_codecs(device: torch.device):
    x = torch.randn((1, 5000), generator=torch.Generator().manual_seed(1)).to(device)
    for name in OPTIONS:
        assert torch.equal(operator(name, "encode")(x), codecs.get(name).encode(x)), name


def test_other_dtypes(device: torch.device):
    for name in OPTIONS:
        for dtype in (torch.bfloat16, torch.float64):
            x = calls(name, device)["encode"][0].to(dtype)
            wire = operator(name, "encode")(x, *OPTIONS[name])
            y = operator(name, "decode")(wire, N, dtype, *OPTIONS[name])
            assert y.dtype == dtype
            assert torch.equal(y, codec_of(name).decode(codec_of(name).encode(x), N, dtype=dtype))


def test_bad_arguments_reach_the_caller():
    with pytest.raises(ValueError, match="block must be a positive multiple of 8"):
        torch.ops.bagua.sign_encode(torch.zeros((1, 8)), 3)
    with pytest.raises(ValueError, match="x_RN must have 2 dims"):
        torch.ops.bagua.sign_encode(torch.zeros(8), 8)
    with pytest.raises(ValueError, match="residual_RN must match x_RN"):
        torch.ops.bagua.sign_encode_with_feedback(torch.zeros((1, 8)), torch.zeros((1, 9)), 8)
