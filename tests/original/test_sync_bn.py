"""Batch normalisation over all ranks: the output, the statistics and the gradients of one layer on the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tests.rank_pool import RankPool

SIZE, CHANNELS = 3, 8


def _inputs(rank: int) -> torch.Tensor:
    return torch.randn(4 + rank, CHANNELS, 5, 5, generator=torch.Generator().manual_seed(rank))


def _ranks() -> dict[str, list[float]]:
    from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm

    layer, inputs = SyncBatchNorm(num_features=CHANNELS), _inputs(dist.get_rank()).requires_grad_()
    output = layer(inputs)
    (output * output.detach().cos()).sum().backward()
    assert inputs.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    assert layer.running_mean is not None and layer.running_var is not None
    converted = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(CHANNELS)))
    assert isinstance(converted[0], SyncBatchNorm)
    return {
        "output": output.tolist(),
        "mean": layer.running_mean.tolist(),
        "var": layer.running_var.tolist(),
        "weight": layer.weight.grad.tolist(),
        "bias": layer.bias.grad.tolist(),
        "inputs": inputs.grad.tolist(),
    }


def test_as_one_layer_on_the_whole_batch(pool: RankPool) -> None:
    layer, inputs = nn.BatchNorm2d(CHANNELS), torch.cat([_inputs(rank) for rank in range(SIZE)]).requires_grad_()
    output = layer(inputs)
    (output * output.detach().cos()).sum().backward()
    found = pool.run(SIZE, _ranks)
    assert inputs.grad is not None and layer.running_mean is not None and layer.running_var is not None
    at = 0
    for rank, each in enumerate(found):
        rows = slice(at, at + 4 + rank)
        at += 4 + rank
        for name, expected in (
            ("output", output[rows]),
            ("inputs", inputs.grad[rows]),
            ("mean", layer.running_mean),
            ("var", layer.running_var),
        ):
            assert torch.allclose(torch.tensor(each[name]), expected, rtol=1e-4, atol=1e-5), name
    for name in ("weight", "bias"):  # a rank's gradients are those of its rows
        total = torch.tensor([each[name] for each in found]).sum(0)
        assert torch.allclose(total, getattr(layer, name).grad, rtol=1e-4, atol=1e-4), name
