"""What only a GPU can show: capture, torch's synchronised batch norm, loss scaling with fused optimizers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import bagua

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """One rank."""
    bagua.init_process_group()
    yield
    bagua.destroy_process_group()


def model_and_optimizer(algorithm: str = "gradient_allreduce") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return bagua.distribute(model, optimizer, algorithm), optimizer


def test_capture_in_a_cuda_graph_is_refused() -> None:
    model, optimizer = model_and_optimizer()
    x = torch.randn(4, 8, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="CUDA graphs.*cannot be captured"), torch.cuda.graph(graph):
        model(x)
    model(x).sum().backward()  # it goes on without
    optimizer.step()
    assert bagua.stats(model).steps == 2


def test_torchs_synchronised_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8), nn.Linear(8, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 8, device="cuda").cumsum(0)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_ours_equals_torchs_batch_norm_on_a_gpu() -> None:
    x = torch.randn(6, 3, 5, device="cuda")
    ours, torchs = bagua.nn.SyncBatchNorm(3).cuda(), nn.BatchNorm1d(3).cuda()
    assert torch.allclose(ours(x), torchs(x))
    assert torch.allclose(ours.running_var, torchs.running_var)


@pytest.mark.parametrize("fused", [False, True])
def test_scaler(fused: bool) -> None:
    model = nn.Linear(8, 4).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    bagua.distribute(model, optimizer)
    scaler = bagua.GradScaler("cuda", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(4, 8, device="cuda")).float().square().mean()
        before = model.weight.detach().clone()
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.weight) == (step == 2)
    assert scaler.get_scale() == 512.0


def test_a_module_that_is_moved() -> None:
    model, _ = model_and_optimizer()
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    model.cpu()
    with pytest.raises(RuntimeError, match="was converted, moved"):
        model(torch.randn(4, 8))


def test_inductor_by_region() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]).cuda()
    want = [p.detach().clone() for p in model.parameters()]
    for part in model:
        part[0].compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, bucket_bytes=1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    assert bagua.stats(model).steps == 3
    assert not any(torch.equal(a, b) for a, b in zip(want, model.parameters(), strict=True))
