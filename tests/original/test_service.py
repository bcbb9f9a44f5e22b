"""What the tuning service did: settings as data, buckets in the order of gradients, one dtype in each."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from bagua.bagua_define import BaguaHyperparameter, TensorDeclaration, TensorDtype, get_tensor_declaration_bytes
from bagua.torch_api.utils import StatisticalAverage
from tests.rank_pool import RankPool


def test_hyperparameters_are_updated() -> None:
    buckets = [[TensorDeclaration({"name": "A", "num_elements": 123, "dtype": TensorDtype.F32})]]
    found = BaguaHyperparameter(is_hierarchical_reduce=False).update({"buckets": buckets})
    assert found.buckets == buckets and found.is_hierarchical_reduce is False
    assert get_tensor_declaration_bytes(buckets[0][0]) == 492


class _OutOfOrder(nn.Module):
    """Gradients come in the order 1, 2, 0: not that of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
        self.layers[2].half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[2](self.layers[0](x).half()).float()
        return self.layers[1](hidden)


def _buckets() -> tuple[list[list[str]], list[int]]:
    import bagua.torch_api as api

    model: Any = _OutOfOrder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithm = api.algorithms.gradient_allreduce.GradientAllReduceAlgorithm()
    model.with_bagua([optimizer], algorithm, bucket_bytes=200)
    model(torch.ones(2, 8)).sum().backward()
    return [list(bucket.names) for bucket in model.bagua_buckets], [bucket.bytes() for bucket in model.bagua_buckets]


def test_buckets_follow_the_gradients_and_never_mix_dtypes(pool: RankPool) -> None:
    for names, sizes in pool.run(2, _buckets):
        assert names == [["layers.1.weight"], ["layers.2.weight"], ["layers.0.weight"]]
        assert sizes == [256, 128, 256]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("service", "AutotuneService"),
        ("service", "AutotuneClient"),
        ("service.bayesian_optimizer", "IntParam"),
    ],
)
def test_the_server_is_gone(module: str, name: str) -> None:
    gone: Any = getattr(import_module(f"bagua.{module}"), name)
    with pytest.raises(NotImplementedError, match="autotune=True"):
        gone(2, autotune_level=1)


def test_statistical_average(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    tail = (2.0166309999999985, 2.499061185570463)
    average = StatisticalAverage(1000.0, records=[5.0, 4.5005175, 3.5034241850204078], record_tail=tail)
    now[0] += 1.0
    average.record(6.0)
    for seconds, expected in (
        (1.0, 6.0),
        (2.0, (6.0 + 5.0) / 2.0),
        (3.0, (6.0 + 4.5005175 * 2.0) / 3.0),
        (5.0, (6.0 + 3.5034241850204078 * 4.0) / 5.0),
        (7.0, (6.0 + 2.499061185570463 * (4.0 + tail[0])) / 7.0),
    ):
        assert average.get_records_mean(seconds) == pytest.approx(expected, abs=0.1)
    assert average.total_recording_time() == pytest.approx(7.0166, abs=0.001)
