"""FSDP2, autotuning, checkpoints and decoupled rounds on every device there is; see test_on_device.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bagua
import bagua.contrib  # registers decoupled_diloco
from bagua.checkpoint import load, save
from bagua.interop import compress_fsdp
from tests.autotune.training import QUICK, START, WIDTH, make_model
from tests.engine.test_on_device import batch, model_on, values
from tests.rank_pool import RankPool


def close(device: torch.device, found: list[Tensor], on_cpu: list[Tensor]) -> None:
    """Numbers that a GPU rounds otherwise may be encoded otherwise."""
    for a, b in zip(on_cpu, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.02 if device.type == "cuda" else 1e-5)


def sharded(device: torch.device, layout: str, options: dict[str, Any]) -> list[Tensor]:
    """On a rank: whole weights after six steps, with the state of error feedback loaded again on the way."""
    model: Any = model_on(device)
    size = dist.get_world_size()
    if layout == "flat":
        mesh, extra = init_device_mesh(device.type, (size,)), {}
    else:
        both = init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("replicate", "shard"))
        mesh, extra = both["shard"], {"replica_group": both["replicate"]}
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = compress_fsdp(model, **options, **extra)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(6):
        if step == 3:
            state.load_state_dict(state.state_dict())
        model(batch(step, device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert state.bytes_sent > 0
    return [each.full_tensor().cpu() for each in model.state_dict().values()]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("flat", {"reduce_scatter": "identity", "all_gather": "identity"}),
        ("flat", {"reduce_scatter": "int4", "all_gather": "minmax_uint8", "error_feedback": True}),
        ("hybrid", {"reduce_scatter": "eden:bits=2", "all_gather": "bf16", "replica": "bytegrad"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fsdp(pool: RankPool, layout: str, options: dict[str, Any], device: torch.device) -> None:
    ranks = pool.run(2 if layout == "flat" else 4, sharded, device, layout, options)
    assert all(torch.equal(a, b) for other in ranks[1:] for a, b in zip(ranks[0], other, strict=True))
    close(device, ranks[0], pool.run(len(ranks), sharded, torch.device("cpu"), layout, options)[0])


def tuned(device: torch.device) -> tuple[str, list[Tensor]]:
    """On a rank: how far tuning came, and weights after it."""
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    bagua.distribute(model, optimizer, "bytegrad", autotune=QUICK, bucket_bytes=START)
    for step in range(400):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
        tuning = bagua.stats(model).tuning
        assert tuning is not None
        if tuning.phase in ("done", "off"):
            break
    found = values(model)
    bagua.detach(model)
    return tuning.phase, found


def test_autotuning(pool: RankPool, device: torch.device) -> None:
    (phase, first), (other, second) = pool.run(2, tuned, device)
    assert phase == other == "done"
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(first, second, strict=True))


def saved(device: torch.device, path: Path, algorithm: str) -> None:
    model, optimizer = _trainable(device, algorithm)
    for step in range(4):
        _step(model, optimizer, step, device)
    save(path, {"model": model, "optimizer": optimizer}, step=4)
    bagua.detach(model)


def resumed(device: torch.device, path: Path, algorithm: str) -> list[Tensor]:
    """On a rank, of as many or of others: weights four steps later."""
    model, optimizer = _trainable(device, algorithm)
    assert load(path, {"model": model, "optimizer": optimizer}) is not None
    for step in range(4, 8):
        _step(model, optimizer, step, device)
    bagua.average_parameters(model)
    found = values(model)
    bagua.detach(model)
    return found


def decoupled(device: torch.device) -> list[Tensor]:
    model, optimizer = _trainable(device, "decoupled_diloco")
    for step in range(6):
        _step(model, optimizer, step, device)
    bagua.average_parameters(model)
    found = values(model)
    bagua.detach(model)
    return found


@pytest.mark.parametrize("algorithm", ["bytegrad", "low_precision_decentralized", "local_sgd"])
@pytest.mark.parametrize("size", [2, 3])
def test_checkpoints(pool: RankPool, algorithm: str, size: int, tmp_path: Path, device: torch.device) -> None:
    pool.run(2, saved, device, tmp_path, algorithm)
    ranks = pool.run(size, resumed, device, tmp_path, algorithm)
    assert all(torch.equal(a, b) for other in ranks[1:] for a, b in zip(ranks[0], other, strict=True))
    if device.type == "cuda":  # a checkpoint of one device can be loaded on another
        close(device, ranks[0], pool.run(size, resumed, torch.device("cpu"), tmp_path, algorithm)[0])


def test_decoupled_rounds(pool: RankPool, device: torch.device) -> None:
    first, second = pool.run(2, decoupled, device)
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(first, second, strict=True))


def _trainable(device: torch.device, algorithm: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_on(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"communication_interval": 3} if algorithm == "decoupled_diloco" else {}
    bagua.distribute(model, optimizer, algorithm, bucket_bytes=1500, **options)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, device: torch.device) -> None:
    optimizer.zero_grad()
    model(batch(step, device)).square().mean().backward()
    optimizer.step()
