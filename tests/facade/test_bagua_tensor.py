"""The methods on `torch.Tensor`, and buckets made of Bagua tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel

_GRADIENT = (lambda param: param.grad, lambda param, grad: setattr(param, "grad", grad))


def _parameter(values: list[float], name: str = "weight") -> Any:
    param: Any = nn.Parameter(torch.tensor(values))
    return param.bagua_ensure_grad().ensure_bagua_tensor(name, "model", *_GRADIENT)


def test_a_tensor_stands_for_itself_or_for_what_the_getter_returns() -> None:
    plain: Any = torch.arange(3.0)
    assert not plain.is_bagua_tensor()
    with pytest.raises(AttributeError, match=r"ensure_bagua_tensor\(\) first"):
        plain.bagua_getter_closure()
    assert plain.ensure_bagua_tensor("a", "model") is plain
    assert plain.is_bagua_tensor() and (plain.bagua_tensor_name, plain.bagua_module_name) == ("a", "model")
    assert plain.bagua_getter_closure() is plain and plain.bagua_backend_tensor() is plain
    assert plain.bagua_backend is None
    assert plain.ensure_bagua_tensor("a", "model") is plain.ensure_bagua_tensor() and plain.bagua_tensor_name == "a"
    with pytest.raises(ValueError, match="registered as 'a' of 'model' already, got 'b' of 'model'"):
        plain.ensure_bagua_tensor("b", "model")
    with pytest.raises(TypeError, match="name: expected a string or None, got int"):
        torch.zeros(2).ensure_bagua_tensor(3)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="setter_closure"):
        torch.ones(1).ensure_bagua_tensor("c", "model", None, lambda tensor, other: None)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="without a setter_closure"):
        plain.bagua_setter_closure(torch.ones(3))
    param = _parameter([1.0, 2.0])
    assert param.bagua_getter_closure() is param.grad
    param.bagua_setter_closure(torch.full((2,), 7.0))
    assert param.grad.tolist() == [7.0, 7.0] and param.bagua_ensure_grad().grad.tolist() == [7.0, 7.0]
    param.grad = None
    assert param.bagua_getter_closure().tolist() == [0.0, 0.0]
    with pytest.raises(NotImplementedError, match="only a torch.nn.Parameter"):
        torch.ones(1).bagua_ensure_grad()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="getter_closure returned int"):
        torch.ones(1).ensure_bagua_tensor("d", "model", lambda tensor: 3)  # type: ignore[attr-defined]


def test_a_view_shares_memory_and_copies_are_plain() -> None:
    base: Any = torch.zeros(4)
    view = base.to_bagua_tensor("view", "model")
    view.fill_(2.0)
    assert base.tolist() == [2.0] * 4 and view.is_bagua_tensor() and not base.is_bagua_tensor()
    param = _parameter([1.0])
    for other in (copy.deepcopy(param), pickle.loads(pickle.dumps(param)), param.detach()):
        assert not other.is_bagua_tensor() and other.tolist() == [1.0]


@pytest.mark.parametrize("name", ["bagua_set_storage", "bagua_set_registered_storage"])
def test_storage(name: str) -> None:
    flat = torch.arange(6.0)
    plain: Any = torch.zeros(2).ensure_bagua_tensor("plain", "model")  # type: ignore[attr-defined]
    getattr(plain, name)(flat.untyped_storage(), 1)
    assert plain.tolist() == [1.0, 2.0]
    param = _parameter([0.0, 0.0, 0.0])
    getattr(param, name)(flat.untyped_storage(), 3)
    assert param.grad.tolist() == [3.0, 4.0, 5.0] and param.tolist() == [0.0, 0.0, 0.0]
    flat.zero_()
    assert plain.tolist() == [0.0, 0.0] and param.grad.tolist() == [0.0] * 3


def test_a_bucket_flattens_what_has_a_setter() -> None:
    params = [_parameter([1.0, 2.0], "a"), _parameter([3.0], "b")]
    for number, param in enumerate(params):
        param.grad.fill_(number + 1.0)
    loose = BaguaBucket(params, "0", flatten=False)
    assert not loose.check_flatten() and loose.backend_tensor is None and loose.padding_tensor is None
    bucket = BaguaBucket(params, "0", flatten=True, alignment=4)
    assert bucket.check_flatten() and bucket.backend_tensor is not None and bucket.bytes() == 12
    assert bucket.backend_tensor.tolist() == bucket.flattened_tensor().tolist() == [1.0, 1.0, 2.0, 0.0]
    bucket.backend_tensor.mul_(3.0)
    assert [param.grad.tolist() for param in params] == [[3.0, 3.0], [6.0]]
    assert bucket.backend_bucket is bucket and bucket.clear_ops() is bucket and bucket.bagua_module_name == "model"
    with pytest.raises(RuntimeError, match=r"'a' is in no bucket that is scheduled.*bagua\.Algorithm"):
        params[0].bagua_mark_communication_ready()


def test_a_bucket_refuses_what_it_cannot_exchange() -> None:
    param = _parameter([1.0])
    half: Any = torch.zeros(1, dtype=torch.float16)
    with pytest.raises(ValueError, match="bucket 'x' has none"):
        BaguaBucket([], "x", True)
    with pytest.raises(TypeError, match="number 1 of bucket 'x' is no Bagua tensor"):
        BaguaBucket([param, torch.ones(1)], "x", True)
    with pytest.raises(ValueError, match=r"mixes torch.float16 on cpu, torch.float32 on cpu; make one bucket of each"):
        BaguaBucket([param, half.ensure_bagua_tensor("half", "model")], "x", True)
    with pytest.raises(ValueError, match="2 modules"):
        BaguaBucket([param, half.to_bagua_tensor("half", "other")], "x", True)
    bucket = BaguaBucket([param], "x", True)
    with pytest.raises(ValueError, match="scattergather"):
        bucket.append_centralized_synchronous_op(compression="MinMaxUInt8")
    with pytest.raises(ValueError, match=r"expected 'MinMaxUInt8', got 'TopK'.*bagua\.Algorithm"):
        bucket.append_centralized_synchronous_op(scattergather=True, compression="TopK")
    small: Any = torch.zeros(2)
    with pytest.raises(ValueError, match="peer_weight: expected 1 elements"):
        bucket.append_decentralized_synchronous_op(small.ensure_bagua_tensor("peer"))
    like: Any = bucket.flattened_tensor()
    with pytest.raises(ValueError, match="expected one of all, shift_one, got 'chord'"):
        bucket.append_decentralized_synchronous_op(like.ensure_bagua_tensor("peer"), peer_selection_mode="chord")
    with pytest.raises(NotImplementedError, match="with_bagua"):
        BaguaDistributedDataParallel(nn.Linear(1, 1))
