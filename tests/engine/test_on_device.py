"""Two ranks train on every device there is; on a GPU that both share, over gloo by way of host memory."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua import algorithms
from bagua.codecs import Bf16, Eden, Int4, MinMaxUInt8, Sign, TopK
from bagua.comm.groups import Groups
from bagua.exchanges import AllReduce, DifferenceGossip, Exchange, Gossip, PowerSGD, ScatterGather
from bagua.interop import ddp_hook
from bagua.optim import fuse
from bagua.topologies import Ring
from benchmarks.convergence.delayed import DelayedAverage
from tests.rank_pool import RankPool
from tests.rank_threads import run_threads

EXCHANGES: dict[str, Exchange] = {
    "all_reduce": AllReduce(),
    "all_reduce bf16": AllReduce(codec=Bf16()),
    "scatter_gather uint8": ScatterGather(MinMaxUInt8()),
    "scatter_gather sign": ScatterGather(Sign(), error_feedback=True),
    "scatter_gather top_k": ScatterGather(TopK(0.1), error_feedback=True),
    "scatter_gather eden": ScatterGather(Eden(), running_scale=True),
    "scatter_gather trellis": ScatterGather(Eden(bits=2, states=8), error_feedback=True),
    "scatter_gather sign, means uint8": ScatterGather(Sign(), error_feedback=True, gather_codec=MinMaxUInt8()),
    "scatter_gather eden, means trellis": ScatterGather(Eden(), True, True, gather_codec=Eden(bits=2, states=8)),
    "gossip": Gossip(Ring()),
    "difference_gossip": DifferenceGossip(Ring(), Int4()),
    "power_sgd": PowerSGD(((30, 33), (13, 1))),
}


def exchanged(groups: Groups, name: str, device: torch.device) -> Tensor:
    """On a rank: what three rounds make of its values, on the CPU again."""
    x = torch.randn(1003, generator=torch.Generator().manual_seed(groups.rank)).to(device)
    exchange = EXCHANGES[name]
    with torch.no_grad():
        state = exchange.init(x, groups)
        for step in range(3):
            exchange.run(x, state, groups, step)
    return x.cpu()


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_give_on_a_gpu_what_they_give_on_a_cpu(name: str, device: torch.device) -> None:
    want = run_threads(3, exchanged, name, torch.device("cpu"))
    got = run_threads(3, exchanged, name, device, staged=device.type == "cuda")
    for a, b in zip(want, got, strict=True):
        if name == "power_sgd":  # products of matrices round differently
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(a, b)


def model_on(device: torch.device, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = bagua.nn.SyncBatchNorm(24) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(16, 24), middle, nn.Linear(24, 24), nn.Linear(24, 4)).to(device)


def batch(step: int, device: torch.device, rank: int | None = None) -> Tensor:
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(device)


def values(module: nn.Module) -> list[Tensor]:
    return [param.detach().cpu() for param in module.parameters()]


def trained(algorithm: str, device: torch.device, fused: bool, **options: Any) -> list[Tensor]:
    """On a rank: weights after six steps, with a checkpoint after the third and a guard on the way."""
    model = model_on(device)
    lr = 0.01 if algorithm in ("qadam", "one_bit_lamb", "zero_one_adam") else 0.1
    own = {"qadam": bagua.optim.QAdam, "one_bit_lamb": bagua.optim.OneBitLamb, "zero_one_adam": bagua.optim.ZeroOneAdam}
    optimizer: torch.optim.Optimizer = own.get(algorithm, torch.optim.SGD)(model.parameters(), lr=lr)
    if fused:
        fuse(optimizer)

    def start() -> None:
        lossy = algorithm in ("bytegrad", "power_sgd")
        guard = bagua.Guard(every=2) if lossy else None
        bagua.distribute(model, optimizer, algorithm, bucket_bytes=1500, guard=guard, **options)

    start()
    for step in range(6):
        if step == 3:
            state, weights = bagua.state_dict(model), {k: v.clone() for k, v in model.state_dict().items()}
            bagua.detach(model)
            start()
            model.load_state_dict(weights)
            bagua.load_state_dict(model, state)
        optimizer.zero_grad()
        model(batch(step, device)).square().mean().backward()
        optimizer.step()
    bagua.average_parameters(model)
    found = values(model)
    bagua.detach(model)
    return found


@pytest.mark.parametrize(
    "algorithm", [each.name for each in algorithms.available(builtin_only=True) if each.name != "async"]
)
def test_algorithms(pool: RankPool, algorithm: str, device: torch.device) -> None:
    first, second = pool.run(2, trained, algorithm, device, False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(bool(a.isfinite().all()) for a in first)
    if device.type == "cuda":
        on_cpu = pool.run(2, trained, algorithm, torch.device("cpu"), False)[0]
        for a, b in zip(on_cpu, first, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


def trained_on_sites(algorithm: str, device: torch.device) -> list[Tensor]:
    with mock.patch.dict(os.environ, BAGUA_SITE="ab"[dist.get_rank() // 2]):
        return trained(algorithm, device, False, hierarchical=True)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "low_precision_decentralized"])
def test_two_sites_of_two_hosts(pool: RankPool, algorithm: str, device: torch.device) -> None:
    """Over gloo, CUDA tensors go through host memory, and each host exchanges a share."""
    ranks = pool.run(4, trained_on_sites, algorithm, device, nodes=range(4))
    assert all(torch.equal(a, b) for other in ranks[1:] for a, b in zip(ranks[0], other, strict=True))
    if device.type == "cuda":
        on_cpu = pool.run(4, trained_on_sites, algorithm, torch.device("cpu"), nodes=range(4))[0]
        for a, b in zip(on_cpu, ranks[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


def trained_on_nodes(algorithm: str, device: torch.device) -> list[Tensor]:
    return trained(algorithm, device, False, hierarchical=True)


@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized"]
)
def test_two_nodes_of_two_ranks(pool: RankPool, algorithm: str, device: torch.device) -> None:
    ranks = pool.run(4, trained_on_nodes, algorithm, device, nodes=(0, 0, 1, 1))
    assert all(torch.equal(a, b) for other in ranks[1:] for a, b in zip(ranks[0], other, strict=True))
    if device.type == "cuda":
        on_cpu = pool.run(4, trained_on_nodes, algorithm, torch.device("cpu"), nodes=(0, 0, 1, 1))[0]
        for a, b in zip(on_cpu, ranks[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


def measured_links(device: torch.device, how: str) -> tuple[str, list[Tensor]]:
    """On a rank: what was chosen by the links, and weights after steps with it."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "auto":
        bagua.distribute(model, optimizer, "auto", bucket_bytes=1500)
    else:
        bagua.distribute(model, optimizer, "bytegrad", bucket_bytes=1500, rank_order="measured")
    for step in range(60):
        optimizer.zero_grad()
        model(batch(step, device)).square().mean().backward()
        optimizer.step()
        if how != "auto" or bagua.explain(model).phase == "settled":
            break
    said = bagua.explain(model).chosen if how == "auto" else "in order"
    bagua.average_parameters(model)
    found = values(model)
    bagua.detach(model)
    return said, found


@pytest.mark.parametrize("how", ["auto", "rank_order"])
def test_links_are_measured(pool: RankPool, how: str, device: torch.device) -> None:
    (said, first), *others = pool.run(3, measured_links, device, how, nodes=range(3))
    assert said
    for other, weights in others:
        assert other == said
        assert all(torch.equal(a, b) for a, b in zip(first, weights, strict=True))


def test_a_fused_optimizer_on_buckets(pool: RankPool, device: torch.device) -> None:
    plain, fused = (pool.run(2, trained, "gradient_allreduce", device, fused)[0] for fused in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, fused, strict=True))


def moments_and_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """First moments of Adam, second ones, and weights, on the CPU."""
    states = [optimizer.state[param] for param in model.parameters()]
    return [each[name].cpu() for name in ("exp_avg", "exp_avg_sq") for each in states] + values(model)


def corrected(algorithm: Any, device: torch.device) -> list[Tensor]:
    """On a rank: weights and moments of AdamW after eight steps."""
    model = model_on(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    bagua.distribute(model, optimizer, algorithm, bucket_bytes=1500)
    for step in range(8):
        optimizer.zero_grad()
        model(batch(step, device)).square().mean().backward()
        optimizer.step()
    found = moments_and_values(model, optimizer)
    bagua.detach(model)
    return found


@pytest.mark.parametrize(
    "algorithm",
    [
        "decentralized",
        algorithms.Decentralized(peer_selection_mode="shift_one", gradient_interval=2),
        algorithms.LocalSGD(codec="identity"),
        DelayedAverage(mean_moments=True),
        DelayedAverage(2, 2, mean_moments=True),
    ],
    ids=["gossip", "samples", "rounds", "late", "later"],
)
def test_moments_of_mean_gradients(pool: RankPool, algorithm: Any, device: torch.device) -> None:
    """What an average shows of them is the same on a GPU."""
    found, on_cpu = (pool.run(2, corrected, algorithm, where) for where in (device, torch.device("cpu")))
    for ours, want in zip(found, on_cpu, strict=True):
        assert all(bool(each.isfinite().all()) for each in ours)
        for a, b in zip(ours, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=1e-4)


class Skipping(nn.Module):
    """A layer in the middle that some passes leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x if skip else self.middle(x))


def used_by_some(algorithm: Any, device: torch.device) -> list[Tensor]:
    """On a rank: moments and weights of AdamW. In every third step rank 0 alone uses the layer in the middle."""
    torch.manual_seed(0)
    model = Skipping().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    bagua.distribute(model, optimizer, algorithm, bucket_bytes=1500)
    for step in range(9):
        optimizer.zero_grad()
        model(batch(step, device), skip=dist.get_rank() == 1 and step % 3 == 2).square().mean().backward()
        optimizer.step()
    found = moments_and_values(model, optimizer)
    bagua.detach(model)
    return found


@pytest.mark.parametrize(
    "algorithm",
    [
        *("decentralized", algorithms.LocalSGD(communication_interval=2), algorithms.DiLoCo(communication_interval=3)),
        DelayedAverage(mean_moments=True),
    ],
    ids=["gossip", "rounds", "diloco", "late"],
)
def test_moments_where_ranks_use_unlike_parameters(pool: RankPool, algorithm: Any, device: torch.device) -> None:
    """Ranks tell each other what they have stepped, on a lane of the device."""
    found, on_cpu = (pool.run(2, used_by_some, algorithm, where) for where in (device, torch.device("cpu")))
    for ours, want in zip(found, on_cpu, strict=True):
        for a, b in zip(ours, want, strict=True):
            assert bool(a.isfinite().all())
            torch.testing.assert_close(a, b, rtol=0.02, atol=1e-4)


MEANS: dict[str, algorithms.Algorithm] = {
    "1 bit, means in 2 bits": algorithms.ByteGrad(codec=Eden(), gather_codec=Eden(bits=2, states=8)),
    "trellis": algorithms.ByteGrad(codec=Eden(bits=2, states=8)),
    "sign, means in 8 bits": algorithms.ByteGrad(codec=Sign(), gather_codec=MinMaxUInt8()),
    "shared": algorithms.GradientAllReduce(codec=Eden(), gather_codec=Eden(bits=2)),
}


class Given(nn.Module):
    """Gradients that do not depend on weights, so they have the same bits on all devices."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(77))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        factors = [torch.randn(each.shape, generator=generator).to(each.device) for each in (self.w, self.b)]
        return (self.w * factors[0]).sum() + (self.b * factors[1]).sum()


def encoded_means(name: str, device: torch.device) -> list[Tensor]:
    """On a rank: the last gradients, and moments and weights of AdamW after eight steps."""
    model = Given().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    bagua.distribute(model, optimizer, MEANS[name], bucket_bytes=1500)
    for step in range(8):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    found = [each.grad.cpu() for each in model.parameters() if each.grad is not None]
    found += moments_and_values(model, optimizer)
    bagua.detach(model)
    return found


@pytest.mark.parametrize("name", MEANS)
def test_codecs_of_the_mean_with_adam(pool: RankPool, name: str, device: torch.device) -> None:
    """The second moments without the noise of the codecs, too."""
    found, on_cpu = (pool.run(2, encoded_means, name, where) for where in (device, torch.device("cpu")))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for a, b in zip(found[0], on_cpu[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def rounds(device: torch.device, kind: type[torch.optim.Optimizer]) -> float:
    """On a rank: how often async averaged."""
    model = model_on(device)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    bagua.distribute(model, optimizer, "async", sync_interval_ms=0)
    count, step = 0.0, 0
    while count < 1 and step < 100_000:  # all ranks take part in a round, so each of them sees its end
        optimizer.zero_grad()
        model(batch(step, device)).square().mean().backward()
        optimizer.step()
        found = bagua.stats(model).extra.get("round_s")
        count, step = 0 if found is None else found.count, step + 1
    bagua.detach(model)
    return count


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_async(pool: RankPool, kind: type[torch.optim.Optimizer], device: torch.device) -> None:
    assert all(count >= 1 for count in pool.run(2, rounds, device, kind))


def normalised(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """On a rank: gradients and running moments of a synchronised batch norm, and of one that sees all inputs."""
    ours = model_on(device, norm=True)
    bagua.distribute(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    whole = model_on(device)
    whole[1] = nn.BatchNorm1d(24).to(device)
    everything = torch.cat([batch(0, device, rank) for rank in range(dist.get_world_size())])
    ours(batch(0, device)).square().mean().backward()
    whole(everything).square().mean().backward()
    return [p.grad.cpu() for p in ours.parameters()], [p.grad.cpu() for p in whole.parameters()]


def test_synchronised_batch_norm(pool: RankPool, device: torch.device) -> None:
    for ours, whole in pool.run(2, normalised, device):
        for a, b in zip(ours, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def scaled(device: torch.device) -> tuple[float, bool]:
    """On a rank: the scale at the end, and whether the step that overflowed on rank 1 was skipped here."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, "decentralized")
    scaler = bagua.GradScaler(device.type, init_scale=1024.0)
    skipped = False
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(step, device)).square().mean()
        before = values(model)
        bad = step == 1 and dist.get_rank() == 1
        scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            skipped = scaler.get_scale() == 512.0 and len(before) > 0
    bagua.detach(model)
    return scaler.get_scale(), skipped


def test_ranks_skip_the_same_steps(pool: RankPool, device: torch.device) -> None:
    assert pool.run(2, scaled, device) == [(512.0, True)] * 2


def hooked(device: torch.device, hook: bool) -> list[Tensor]:
    """On a rank: gradients under DDP, with Bagua's hook or torch's own sum."""
    model = DistributedDataParallel(model_on(device))
    if hook:
        model.register_comm_hook(None, ddp_hook("gradient_allreduce", device=device))
    for step in range(3):
        model.zero_grad()
        model(batch(step, device)).square().mean().backward()
    return [p.grad.cpu() for p in model.parameters()]


def test_ddp_with_the_hook(pool: RankPool, device: torch.device) -> None:
    for plain, ours in zip(pool.run(2, hooked, device, False), pool.run(2, hooked, device, True), strict=True):
        for a, b in zip(plain, ours, strict=True):
            torch.testing.assert_close(a, b)


def two_streams(device: torch.device) -> list[Tensor]:
    """On a rank: gradients of a model whose halves run on two streams."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    bagua.distribute(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        x = batch(step, device)
        side: Any = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = model[1](model[0](x))
        torch.cuda.current_stream().wait_stream(side)
        model(x)  # the hooks of the forward pass
        model[3](model[2](y)).square().mean().backward()
        optimizer.step()
    return [p.grad.cpu() for p in model.parameters()]


def one_stream(device: torch.device) -> list[Tensor]:
    """As `two_streams`, on one."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    bagua.distribute(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step, device)).square().mean().backward()
        optimizer.step()
    return [p.grad.cpu() for p in model.parameters()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_of_several_streams(pool: RankPool) -> None:
    device = torch.device("cuda")
    for a, b in zip(pool.run(2, one_stream, device)[0], pool.run(2, two_streams, device)[0], strict=True):
        assert torch.equal(a, b)
