"""What the integrations with Hugging Face are made of, without its packages."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bagua.interop.engine_options import split_options
from bagua.interop.replicas import Replicas, check_plain, own_storage


def accelerator(kind: str = "MULTI_CPU", hook: str | None = None, **enabled: bool) -> Any:
    mesh = SimpleNamespace(**{f"{name}_enabled": value for name, value in enabled.items()}) if enabled else None
    handler = None if hook is None else SimpleNamespace(comm_hook=SimpleNamespace(value=hook))
    return SimpleNamespace(distributed_type=SimpleNamespace(value=kind), ddp_handler=handler, parallelism_config=mesh)


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU"])
def test_plain_data_parallelism_is_accepted(kind: str) -> None:
    check_plain(accelerator(kind, hook="no", tp=False), "Trainer")


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_what_shards_the_model_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"MyTrainer: Accelerate is configured for {kind}"):
        check_plain(accelerator(kind), "MyTrainer")
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(ValueError, match=f"configured for {kind}"):
        check_plain(accelerator(), "MyTrainer")


def test_other_ways_to_exchange_are_refused() -> None:
    with pytest.raises(ValueError, match="comm_hook='fp16' is a hook of DistributedDataParallel"):
        check_plain(accelerator(hook="fp16"), "Trainer")
    with pytest.raises(ValueError, match="parallelism_config divides the model"):
        check_plain(accelerator(tp=True), "Trainer")


def test_options_are_split() -> None:
    algorithm, of_engine = split_options("bytegrad", {"codec": "int4", "bucket_bytes": 1000, "hierarchical": None})
    assert algorithm.name == "bytegrad" and "int4" in repr(algorithm) and of_engine == {"bucket_bytes": 1000}
    with pytest.raises(ValueError, match="codex"):
        split_options("bytegrad", {"codex": "int4"})
    with pytest.raises(TypeError, match="fault_tolerant: not an option here"):
        Replicas("bytegrad", {"fault_tolerant": True})


def test_views_of_a_bucket_are_copied_once() -> None:
    bucket, alone = torch.arange(10.0), torch.ones(3)
    state = own_storage({"a": bucket[:4], "tied": bucket[:4], "b": bucket[4:], "alone": alone, "step": 3})
    assert state["a"].data_ptr() == state["tied"].data_ptr() != bucket.data_ptr()
    assert state["a"].untyped_storage().nbytes() == 16 and torch.equal(state["b"], bucket[4:])
    assert state["alone"] is alone and state["step"] == 3


def test_a_state_dict_keeps_its_type_and_metadata() -> None:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    bucket = torch.arange(20.0)
    head.weight = embedding.weight = nn.Parameter(bucket[:15].view(5, 3))
    given = nn.Sequential(embedding, head).state_dict()
    state = own_storage(given)
    assert type(state) is type(given) is OrderedDict, "Accelerate drops the names of tied weights from these only"
    assert list(state) == ["0.weight", "1.weight"] and state["0.weight"] is state["1.weight"]
    assert state["0.weight"].untyped_storage().nbytes() == 60
    assert vars(state)["_metadata"] == vars(given)["_metadata"]
    assert given["0.weight"].data_ptr() == bucket.data_ptr(), "the one that was given is left alone"
    assert type(own_storage({"a": bucket[:4]})) is dict


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"bagua.interop.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'bagua\[{name}\]'"):
        importlib.import_module(f"bagua.interop.{name}")
