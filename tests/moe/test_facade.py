"""The original's names and arguments."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import nn

import bagua.moe
import bagua.torch_api

NAMES = {
    "bagua.torch_api.model_parallel.moe": ("MoE", "is_moe_param"),
    "bagua.torch_api.model_parallel.moe.layer": ("MoE",),
    "bagua.torch_api.model_parallel.moe.experts": ("Experts",),
    "bagua.torch_api.model_parallel.moe.sharded_moe": ("MOELayer", "TopKGate"),
    "bagua.torch_api.model_parallel.moe.utils": ("is_moe_param",),
}


@pytest.mark.parametrize("module", NAMES)
def test_the_originals_paths(module: str) -> None:
    for name in NAMES[module]:
        assert getattr(importlib.import_module(module), name) is getattr(bagua.moe, name)


def test_the_lazy_attributes() -> None:
    assert bagua.torch_api.moe.MoE is bagua.moe.MoE
    assert bagua.torch_api.model_parallel.moe is bagua.torch_api.moe


def test_the_originals_arguments_come_first_with_its_defaults() -> None:
    empty = inspect.Parameter.empty
    wanted = [
        ("hidden_size", empty),
        ("expert", empty),
        ("num_local_experts", 1),
        ("k", 1),
        ("output_dropout_prob", 0.0),
        ("capacity_factor", 1.0),
        ("eval_capacity_factor", 1.0),
        ("min_capacity", 4),
        ("noisy_gate_policy", None),
    ]
    params = inspect.signature(bagua.moe.MoE).parameters.values()
    assert [(p.name, p.default) for p in params if p.kind is p.POSITIONAL_OR_KEYWORD] == wanted
    assert list(inspect.signature(bagua.moe.MoE.forward).parameters) == ["self", "hidden_states", "used_token"]


def test_the_originals_call_and_state_dict() -> None:
    moe = bagua.torch_api.moe.MoE(8, nn.Linear(8, 8), 2, 2)
    out, l_aux, exp_counts = moe(torch.ones(5, 8))
    assert (out.shape, l_aux.shape, exp_counts.shape) == ((5, 8), (), (2,))
    assert moe.num_experts == 2 and moe.bagua_moe.l_aux is l_aux and moe.bagua_moe.exp_counts is exp_counts
    assert set(moe.state_dict()) == {
        "bagua_moe.gate.wg.weight",
        *(f"bagua_moe.experts.bagua_experts.{i}.{name}" for i in range(2) for name in ("weight", "bias")),
    }
