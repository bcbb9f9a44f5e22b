"""The class of torch's interface: the mean over ranks is that of the whole batch; parameters may stay unused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.original.training import flat, make_model
from tests.rank_pool import RankPool

ROWS = 12


def _whole() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, 2, generator=generator), torch.randn(ROWS, 4, generator=generator)


def _split_batch(gradient_as_bucket_view: bool) -> list[float]:
    from bagua.torch_api.data_parallel.distributed import DistributedDataParallel_V1_9_0

    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = dist.distributed_c10d._get_default_group()
    wrapped = DistributedDataParallel_V1_9_0(
        model, process_group=group, optimizers=[optimizer], gradient_as_bucket_view=gradient_as_bucket_view
    )
    inputs, target = _whole()
    for _ in range(4):
        nn.functional.mse_loss(wrapped(inputs[rank::size]), target[rank::size]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model).tolist()


@pytest.mark.parametrize("gradient_as_bucket_view", [True, False])
def test_a_batch_that_is_split_trains_as_the_whole(pool: RankPool, gradient_as_bucket_view: bool) -> None:
    model = make_model(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, target = _whole()
    for _ in range(4):
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in pool.run(3, _split_batch, gradient_as_bucket_view):
        assert torch.allclose(torch.tensor(weights), flat(model), atol=1e-6)


class _Unused(nn.Module):
    """Its third layer is handed out and not used."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(a, b, bias=False) for a, b in ((2, 10), (10, 4), (4, 4)))

    def forward(self, x: torch.Tensor) -> Any:
        return torch.softmax(self.fc2(torch.relu(self.fc1(x))), dim=1), self.fc3


def _unused(find: bool) -> None:
    from bagua.torch_api.data_parallel import DistributedDataParallel
    from tests.facade.old_style import MeanOfGradients

    inputs, target = torch.rand(4, 2), torch.tensor([0, 1, 2, 3])
    names: set[str] = set()
    for algorithm in (MeanOfGradients(), None):
        model: Any = DistributedDataParallel(_Unused(), find_unused_parameters=find, algorithm=algorithm)
        output, layer = model(inputs)
        nn.functional.cross_entropy(output, target).backward()
        assert layer.weight.grad is None or not layer.weight.grad.any()
        assert model.module.fc1.weight.grad.any() and isinstance(layer, nn.Linear)
        names = names or {name for name, _ in model.inner.bagua_ddp.bagua_build_params()}
    assert names == {"fc1.weight", "fc2.weight", "fc3.weight"}


@pytest.mark.parametrize("find_unused_parameters", [True, False])
def test_unused_parameters(pool: RankPool, find_unused_parameters: bool) -> None:
    pool.run(2, _unused, find_unused_parameters)
