"""Exchanges as communication hooks of plain DistributedDataParallel."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.algorithms import ByteGrad, GradientAllReduce, PowerSGD
from bagua.comm.mesh import why_no_mesh
from bagua.exchanges import AllReduce, Gossip, ScatterGather
from bagua.interop import ddp_hook
from tests.engine.training import batch
from tests.rank_pool import RankPool

EXACT: dict[str, Any] = {
    "gradient_allreduce": lambda: ddp_hook("gradient_allreduce"),
    "algorithm": lambda: ddp_hook(GradientAllReduce(hierarchical=True)),
    "exchange": lambda: ddp_hook(AllReduce()),
    "mesh": lambda: ddp_hook(AllReduce(), process_group=init_device_mesh("cpu", (dist.get_world_size(),))),
}
LOSSY: dict[str, Any] = {
    "bytegrad": lambda: ddp_hook(),
    "int4": lambda: ddp_hook("bytegrad", codec="int4"),
    "power_sgd": lambda: ddp_hook(PowerSGD(rank=2, min_compression=1.0)),
    "scatter_gather": lambda: ddp_hook(ScatterGather(bagua.codecs.get("bf16"))),
}


class Wide(nn.Module):
    """Enough parameters for many buckets; one branch is used on even steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 if i == 0 else 48, 48) for i in range(6))
        self.rare = nn.Linear(48, 48)
        self.norm = nn.BatchNorm1d(48)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x + self.rare(x) if rare else x)


def follow(make: Any, steps: int, **ddp: Any) -> tuple[list[Tensor], int, int]:
    """On a rank: train; weights at the end, bytes sent, and the most buckets of a step."""
    torch.manual_seed(5)
    rank = dist.get_rank()
    model = DistributedDataParallel(Wide(), bucket_cap_mb=0.01, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hook = None if make is None else (EXACT | LOSSY)[make]()
    indices: list[int] = []
    if hook is not None:
        model.register_comm_hook(indices, hook)
        plain = hook._slot
        hook._slot = lambda bucket, flat: indices.append(bucket.index()) or plain(bucket, flat)
    for step in range(steps):
        with model.no_sync():
            model(batch(rank, step), True).square().mean().backward()
        model(batch(rank, step + 100), "find_unused_parameters" not in ddp or step % 2 == 0).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    weights = [param.detach().clone() for param in model.parameters()]
    sent = hook.bytes_sent if hook is not None else 0
    if hook is not None:
        hook.stop()
    return weights, sent, max(indices, default=0) + 1


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_hook_equals_plain_ddp(name: str, pool: RankPool) -> None:
    """With several buckets under way, no_sync, clipping and buffers that DDP broadcasts in between."""
    plain = pool.run(2, follow, None, 4)
    for (weights, _, num_buckets), (want, *_) in zip(pool.run(2, follow, name, 4), plain, strict=True):
        assert num_buckets > 3
        for mine, theirs in zip(weights, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    ["bytegrad", "power_sgd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int4", "scatter_gather"))],
)
def test_a_lossy_hook_keeps_replicas_equal_and_sends_less(name: str, pool: RankPool) -> None:
    (first, sent, num_buckets), (second, *_) = pool.run(2, follow, name, 6)
    assert num_buckets > 3
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    exact = 6 * sum(param.numel() * 4 for param in first)
    assert 0 < sent < 0.6 * exact
    want, *_ = pool.run(2, follow, None, 6)[0]
    for mine, theirs in zip(first, want, strict=True):
        assert (mine - theirs).norm() <= 0.5 * theirs.norm() + 1e-3


def follow_over(transport: str, name: str) -> tuple[list[Tensor], int, bool]:
    """On a rank: weights, bytes sent, and whether the hook's lane is native."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGUA_TRANSPORT", transport)
        made = (EXACT | LOSSY)[name]()
        patch.setitem(EXACT, name, lambda: made)
        patch.setitem(LOSSY, name, lambda: made)
        native = made._lane.groups.native
        weights, sent, _ = follow(name, 4)
    return weights, sent, native


@pytest.mark.parametrize("name", ["bytegrad", "gradient_allreduce"])
def test_the_transport_changes_no_bit(name: str, pool: RankPool) -> None:
    over_gloo = pool.run(2, follow_over, "gloo", name)
    for transport in ("", "native"):  # "": the default
        for first, second in zip(over_gloo, pool.run(2, follow_over, transport, name), strict=True):
            assert all(map(torch.equal, first[0], second[0])) and first[1] == second[1]
            assert (first[2], second[2]) == (False, not why_no_mesh())


@pytest.mark.parametrize("option", ["find_unused_parameters", "gradient_as_bucket_view"])
def test_options_of_ddp(option: str, pool: RankPool) -> None:
    """DDP's own collective for the used parameters runs beside the hook's; gradients may be views of its buckets."""
    run = functools.partial(follow, steps=4, **{option: True})
    plain = pool.run(2, run, None)
    for (weights, *_), (want, *_) in zip(pool.run(2, run, "gradient_allreduce"), plain, strict=True):
        for mine, theirs in zip(weights, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "bagua-lane"}


def drop() -> int:
    """How many threads are left of a hook whose module is dropped."""
    before = lanes()  # of earlier jobs; they may end at any time
    model = DistributedDataParallel(Wide(), bucket_cap_mb=0.01)
    model.register_comm_hook(None, ddp_hook())
    model(batch(0, 0), True).sum().backward()
    made = lanes() - before
    assert len(made) == 1
    del model
    gc.collect()
    deadline = time.monotonic() + 60
    while made & lanes() and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(made & lanes())


def test_a_dropped_hook_leaves_no_thread(pool: RankPool) -> None:
    assert pool.run(2, drop) == [0, 0]


@pytest.mark.slow
def test_four_ranks_on_two_nodes_many_times(pool: RankPool) -> None:
    results = pool.run(4, follow, "bytegrad", 30, nodes=[0, 0, 1, 1])
    assert all(all(map(torch.equal, weights, results[0][0])) for weights, *_ in results)


# -- refused, and failing ------------------------------------------------------------------------------------------


def refuse() -> list[str]:
    messages = []
    wrong: list[Any] = [
        ("qadam", {}),
        ("async", {}),
        ("nonsense", {}),
        (Gossip(bagua.topologies.get("ring")), {}),
        (AllReduce(), {"codec": "bf16"}),
        (ByteGrad(), {"codec": "int4"}),
        (3, {}),
        ("bytegrad", {"process_group": init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))}),
    ]
    for exchange, options in wrong:
        with pytest.raises((ValueError, TypeError)) as caught:
            ddp_hook(exchange, **options)
        messages.append(str(caught.value))
    return messages


def test_what_is_no_exchange_of_gradients_is_refused(pool: RankPool) -> None:
    (said,) = pool.run(1, refuse)
    words = [
        "'qadam' does more",
        "'async' does more",
        "unknown",
        "diverge",
        "codec",
        "codec",
        "int",
        "one dimension",
    ]
    assert all(word in message for word, message in zip(words, said, strict=True)), said


def mismatch() -> str:
    with pytest.raises(bagua.RankMismatchError) as caught:
        ddp_hook("bytegrad", codec="int4" if dist.get_rank() else "minmax_uint8")
    return str(caught.value)


def test_ranks_must_choose_alike(pool: RankPool) -> None:
    assert all("rank 1 has" in said and "rank 0 has" in said for said in pool.run(2, mismatch))


def vanish() -> str:
    model = DistributedDataParallel(Wide(), bucket_cap_mb=0.01, broadcast_buffers=False)
    hook = ddp_hook("bytegrad")
    model.register_comm_hook(None, hook)
    for step in range(3):  # DDP makes its buckets anew in the second pass, with a message of its own
        model(batch(0, step), True).sum().backward()
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError, match="CommunicationError") as caught:
        for step in range(3):
            model(batch(0, step), True).sum().backward()
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_backward_pass_with_an_error(pool: RankPool) -> None:
    said, _ = pool.run(2, vanish, dies=[1], group_timeout_s=5)
    assert "rank 0, scatter_gather" in said and "bucket" in said and "no response from rank 1" in said
