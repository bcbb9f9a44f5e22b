"""distribute, train, switch, copy, save, detach, drop: the module stays the user's own."""

# Attributes of modules are tensors or modules for the type checker.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
import bagua.engine.api
from bagua.engine.lanes.lane import InlineLane
from tests.engine.training import Net, batch, distributed, equal, gradients, seeded, train, values
from tests.rank_pool import RankPool

ALGORITHMS = ["gradient_allreduce", "bytegrad"]


def replicate(who: str) -> tuple[dict, dict, dict, bool]:
    """`who` holds optimizer state when distribute is called: rank 0, rank 1, all or none."""
    rank = dist.get_rank()
    model = seeded(Net, rank)
    with torch.no_grad():
        model.frozen.weight.fill_(rank + 5.0)
        model.norm.running_mean.fill_(rank + 7.0)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": params[:2]}, {"params": params[2:], "lr": 0.1 + rank}], lr=0.01 * (rank + 1)
    )
    if who == "all" or who == str(rank):
        for step in range(rank + 1):  # ranks have made a different number of steps
            model(batch(rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    keys = list(model.state_dict())
    same = bagua.distribute(model, optimizer) is model and list(model.state_dict()) == keys
    return values(model), optimizer.state_dict()["state"], optimizer.state_dict()["param_groups"], same


@pytest.mark.parametrize("who", ["none", "0", "1", "all"])
def test_everyone_equals_rank_0(pool: RankPool, who: str) -> None:
    results = pool.run(3, replicate, who)
    for weights, state, groups, same in results:
        assert same and equal(weights, results[0][0]) and equal(state, results[0][1]) and equal(groups, results[0][2])
    weights, state, groups, _ = results[0]
    assert float(weights["frozen.weight"][0, 0]) == 5.0 and groups[0]["lr"] == 0.01
    assert bool(state) == (who in ("0", "all"))
    assert who not in ("0", "all") or float(state[0]["step"]) == 1.0, "a CPU tensor"


def resumed_optimizers() -> list[bool]:
    """Optimizers with all kinds of state: tensors, numbers, None, nested lists."""
    rank, found = dist.get_rank(), []
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True, foreach=False),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.LBFGS(p),
    ):
        model = seeded(lambda: nn.Linear(4, 3), rank)
        optimizer = make(model.parameters())

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(rank, 0, 4)).square().sum()
            loss.backward()
            return loss

        if rank == 0:
            optimizer.step(closure)
        bagua.distribute(model, optimizer)
        stream = io.BytesIO()
        torch.save(optimizer.state_dict(), stream)
        blobs: list = [None, None]
        dist.all_gather_object(blobs, stream.getvalue())
        states = [torch.load(io.BytesIO(blob), weights_only=False) for blob in blobs]
        found.append(equal(*states))
    return found


def test_optimizer_state_of_every_kind(pool: RankPool) -> None:
    assert pool.run(2, resumed_optimizers) == [[True] * 5] * 2


def switch(algorithms: list[str]) -> tuple[list[int], list[bool], dict]:
    model, optimizer = distributed(Net, algorithms[0], bucket_bytes=100)
    buckets, equal_replicas = [], []
    for number, algorithm in enumerate(algorithms):
        if number:
            bagua.distribute(model, optimizer, algorithm, bucket_bytes=100)
        train(model, optimizer, range(3 * number, 3 * number + 3))
        buckets.append(bagua.stats(model).num_buckets)
        total = model.first.weight.detach().clone()
        dist.all_reduce(total)
        equal_replicas.append(torch.allclose(total, dist.get_world_size() * model.first.weight))
    bagua.detach(model)
    return buckets, equal_replicas, values(model)


def test_switching_in_mid_training(pool: RankPool) -> None:
    for buckets, replicas, _ in pool.run(2, switch, ["gradient_allreduce", "bytegrad", "gradient_allreduce"]):
        assert all(replicas)
        assert len(set(buckets)) == 1 and buckets[0] > 1, "the learned order is carried over"


def switch_from_unequal() -> None:
    """Weights of ranks that differ are averaged, not dropped, in a switch."""
    model, optimizer = distributed(algorithm="local_sgd", communication_interval=100)
    train(model, optimizer, range(3))
    mean = model.first.weight.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    assert not torch.allclose(mean, model.first.weight)
    bagua.distribute(model, optimizer, "gradient_allreduce")
    assert torch.allclose(mean, model.first.weight, atol=1e-6)


def test_a_switch_keeps_the_work_of_all_ranks(pool: RankPool) -> None:
    pool.run(3, switch_from_unequal)


def refused_switch() -> bool:
    """A switch that is refused leaves the old algorithm in place."""
    model, optimizer = distributed()
    with pytest.raises(ValueError, match="unknown"):
        bagua.distribute(model, optimizer, "unheard of")
    train(model, optimizer, range(2))
    total = model.first.weight.detach().clone()
    dist.all_reduce(total)
    return torch.allclose(total, 2 * model.first.weight) and "GradientAllReduce" in bagua.stats(model).algorithm


def test_refused_switch_changes_nothing(pool: RankPool) -> None:
    assert pool.run(2, refused_switch) == [True, True]


def detach_leaves_nothing(algorithm: str) -> None:
    model, optimizer = distributed(Net, algorithm, bucket_bytes=100)
    train(model, optimizer, range(2))
    before, grads, threads = values(model), gradients(model), threading.active_count()
    assert bagua.detach(model) is model
    assert equal(before, values(model)) and equal(grads, gradients(model))
    assert threading.active_count() < threads
    assert not model._forward_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks
    for param in model.parameters():
        assert not param._post_accumulate_grad_hooks
        if param.grad is not None:
            assert param.grad.untyped_storage().nbytes() == param.grad.numel() * param.grad.element_size()
    with pytest.raises(ValueError, match="not distributed"):
        bagua.detach(model)
    # Ranks are on their own now.
    optimizer.zero_grad()
    model(batch(dist.get_rank(), 5)).sum().backward()
    total = model.first.weight.grad.clone()
    dist.all_reduce(total)
    assert not torch.allclose(total, 2 * model.first.weight.grad)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_detach(pool: RankPool, algorithm: str) -> None:
    pool.run(2, detach_leaves_nothing, algorithm)


def copies() -> None:
    model, optimizer = distributed()
    train(model, optimizer, range(2))
    stream = io.BytesIO()
    torch.save(model, stream)
    others = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(io.BytesIO(stream.getvalue()), weights_only=False),
    ]
    for other in others:
        assert equal(values(other), values(model))
        other(batch(dist.get_rank(), 9)).sum().backward()  # a plain module: nobody else needs to take part
        with pytest.raises(ValueError, match="not distributed"):
            bagua.stats(other)
    fresh = seeded(Net, 1)
    fresh.load_state_dict(model.state_dict())
    train(model, optimizer, [2])


def test_copies_are_plain_modules(pool: RankPool) -> None:
    pool.run(2, copies)


def cycles(count: int) -> tuple[int, int]:
    before = set(threading.enumerate())
    for number in range(count):
        model, optimizer = distributed(lambda: nn.Linear(6, 3), ALGORITHMS[number % 2])
        train(model, optimizer, [0])
        if number % 3:
            bagua.detach(model)
        ref = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert ref() is None, "the module is kept alive"
    # A dropped module's lane ends by itself, soon; so does a thread for calls of the store, once it is idle.
    for thread in threading.enumerate():
        if thread.name in ("bagua-lane", "bagua-store"):
            thread.join(60)
    return len(set(threading.enumerate()) - before), len(bagua.engine.api.live_engines())


def test_dropped_modules_leave_no_threads(pool: RankPool) -> None:
    assert pool.run(2, cycles, 12) == [(0, 0), (0, 0)]


@pytest.mark.slow
def test_a_hundred_cycles(pool: RankPool) -> None:
    assert pool.run(2, cycles, 100, timeout_s=200) == [(0, 0), (0, 0)]


def resume(algorithm: str, options: dict, lane: str) -> list[dict]:
    """Weights after 8 steps: without interruption, and with a stop, a save and a fresh start after 4."""
    if lane == "inline":
        bagua.engine.api.make_lane = lambda groups, device: InlineLane(groups)
    try:
        model, optimizer = distributed(Net, algorithm, bucket_bytes=100, **options)
        train(model, optimizer, range(4))
        stream = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), bagua.state_dict(model)], stream)
        train(model, optimizer, range(4, 8))
        whole = values(model)

        model, optimizer = distributed(Net, algorithm, bucket_bytes=100, **options)
        saved = torch.load(io.BytesIO(stream.getvalue()))  # weights_only: plain data and tensors
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        bagua.load_state_dict(model, saved[2])
        assert bagua.stats(model).steps == 4 and bagua.stats(model).num_buckets > 1
        train(model, optimizer, range(4, 8))
        return [whole, values(model)]
    finally:
        from bagua.engine.lanes.selection import make_lane

        bagua.engine.api.make_lane = make_lane


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("gradient_allreduce", {}), ("bytegrad", {}), ("bytegrad", {"error_feedback": True})],
)
def test_resume_is_bit_identical_and_so_are_lanes(pool: RankPool, algorithm: str, options: dict) -> None:
    threaded = pool.run(3, resume, algorithm, options, "thread")
    inline = pool.run(3, resume, algorithm, options, "inline")
    for (whole, resumed), (other, _) in zip(threaded, inline, strict=True):
        assert equal(whole, resumed)
        assert equal(whole, other), "InlineLane and ThreadLane differ"


def wrong_states() -> list[str]:
    found = []
    model, optimizer = distributed(Net, "bytegrad", error_feedback=True)
    train(model, optimizer, range(1))
    state = bagua.state_dict(model)
    for change in ({"version": 9}, {"rank": 7}, {"size": 5}, {"plan": [["scale"]]}, {"algorithm": "other"}):
        try:
            bagua.load_state_dict(model, {**state, **change})
        except ValueError as error:
            found.append(str(error))
    train(model, optimizer, range(1, 2))
    return found


def test_foreign_states_are_refused(pool: RankPool) -> None:
    for found in pool.run(2, wrong_states):
        assert len(found) == 5
        for word, message in zip(("version 9", "rank 7", "size 5", "plan", "algorithm other"), found, strict=True):
            assert word in message
