"""What is not compressed is what gloo or NCCL make of it: the same bits, or the same error."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import bagua
from bagua.backend import CompressedProcessGroup
from tests.backend.collectives import ALL, COLLECTIVES, values
from tests.rank_pool import RankPool, gpu_of


def outcome(name: str, group: Any, x: Tensor) -> list[Tensor] | str:
    try:
        return COLLECTIVES[name](group, x)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


def compare(names: list[str], kind: str) -> dict[str, int]:
    """On a rank: run collectives on a plain group and on one of Bagua's; how many dtypes each takes."""
    device = gpu_of(dist.get_rank()) if kind == "cuda" else torch.device(kind)
    plain = dist.new_group(backend="cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    ours = dist.new_group(backend=bagua.Backend("uint8", min_bytes=1_000))
    assert isinstance(ours, CompressedProcessGroup)
    taken = dict.fromkeys(names, 0)
    for name in names:
        for dtype in ALL:
            x = values(dtype, device)
            want, got = outcome(name, plain, x.clone()), outcome(name, ours, x.clone())
            if isinstance(want, str) or isinstance(got, str):
                assert want == got, (name, dtype, want, got)
                continue
            assert len(want) == len(got)
            for mine, theirs in zip(got, want, strict=True):
                assert mine.dtype == theirs.dtype
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=f"{name} of {dtype}")
            taken[name] += 1
    assert ours.traffic.operations == 0
    return taken


def refused(kind: str) -> set[str]:
    """gloo of torch 2.11 has no all-to-all of lists, and NCCL no all-gather of several lists."""
    if kind == "cuda":
        return {"all_gather_coalesced"}
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    try:
        gloo.alltoall([torch.ones(1)], [torch.ones(1)]).wait()
    except RuntimeError as error:
        if "does not support alltoall" not in str(error):
            raise
        return {"all_to_all"}
    return set()


@pytest.mark.parametrize("first", range(4))
def test_small_tensors_are_passed_on(first: int, pool: RankPool, device: torch.device) -> None:
    names, never = list(COLLECTIVES)[first::4], refused(device.type)
    if device.type == "cuda":  # NCCL refuses it on the receiving side only, so that the sender would wait for ever
        names = [name for name in names if name != "recv_any_source"]
    for taken in pool.run(2, compare, names, device.type):
        bitwise = {f"{name} {op}" for name in ("all_reduce", "reduce_scatter") for op in ("BAND", "BOR", "BXOR")}
        for name, count in taken.items():
            least = 0 if name in never else 2 if name not in bitwise else 1 if device.type == "cpu" else 0
            assert count >= least, taken


def test_gloo_takes_most(pool: RankPool) -> None:
    """The comparison above compares results, not only errors."""
    taken = pool.run(2, compare, ["all_reduce SUM", "broadcast", "all_to_all_single", "reduce_scatter_tensor"], "cpu")
    assert all(count >= 6 for count in taken[0].values()), taken


def exact() -> None:
    """On a rank: large tensors whose reduction a codec must not touch."""
    group = dist.group.WORLD
    assert isinstance(group, CompressedProcessGroup)
    rank = dist.get_rank()
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float64):
        x = values(dtype, torch.device("cpu"), n=40_000)
        dist.all_reduce(x)
        assert torch.equal(x, values(dtype, torch.device("cpu"), -rank, 40_000) * 2 + 1)
    base = torch.randn(40_000, generator=torch.Generator().manual_seed(1))
    for op, want in ((dist.ReduceOp.MAX, base.abs() * 2), (dist.ReduceOp.MIN, base.abs())):
        x = base.abs() * (rank + 1)
        dist.all_reduce(x, op)
        assert torch.equal(x, want)
    x = base.clone() if rank == 0 else torch.zeros_like(base)
    dist.broadcast(x, 0)
    assert torch.equal(x, base)
    norm = base[:16_383].clone()  # one element less than 64 KiB
    dist.all_reduce(norm)
    assert torch.equal(norm, 2 * base[:16_383])
    assert group.traffic.operations == 0
    dist.all_reduce(base[:16_384].clone())
    assert group.traffic.operations == 1


def test_other_large_tensors_stay_exact(pool: RankPool) -> None:
    pool.run(2, exact, backend="bagua")


def complex_numbers() -> list[int]:
    """On a rank: compressed operations after complex128, and after complex64, which torch passes on as float32."""
    group = dist.group.WORLD
    assert isinstance(group, CompressedProcessGroup)
    counts = []
    for dtype in (torch.complex128, torch.complex64):
        x = torch.randn(10_000, dtype=dtype, generator=torch.Generator().manual_seed(1))
        reduced = x.clone()
        dist.all_reduce(reduced)
        assert torch.allclose(reduced, 2 * x, atol=0.05)
        counts.append(group.traffic.operations)
    return counts


def test_complex64_is_compressed_as_float32(pool: RankPool) -> None:
    assert pool.run(2, complex_numbers, backend="bagua") == [[0, 1], [0, 1]]


def live() -> list[Any]:
    """On a rank: what the group says of itself, subgroups, meshes, and that groups can be destroyed."""
    world = dist.group.WORLD
    assert isinstance(world, CompressedProcessGroup)
    assert dist.get_backend() == "bagua:int4" and world.spec.codec.name == "int4"
    pair: Any = dist.new_group([0, 1])
    plain: Any = dist.new_group(backend="gloo")
    told = [dist.get_backend(pair), dist.get_backend(plain)]
    subgroups, _ = dist.new_subgroups(2)
    assert isinstance(subgroups, CompressedProcessGroup) and dist.get_world_size(subgroups) == 2
    split = world.split_group([0, 1], timeout=timedelta(seconds=60), group_name="split")
    assert isinstance(split, CompressedProcessGroup) and split.size() == 2
    x = torch.ones(20_000)
    split.allreduce([x]).wait()
    assert split.traffic.operations == 1 and torch.allclose(x, torch.full_like(x, 2.0))
    before = world._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(20_000))
    dist.all_reduce(torch.ones(2))
    assert world._get_sequence_number_for_group() > before + 1
    world.set_timeout(timedelta(seconds=77))
    assert world._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    mesh = init_device_mesh(
        "cpu", (2, 1), mesh_dim_names=("replicate", "shard"), backend_override={"replicate": "bagua", "shard": "gloo"}
    )
    told += [dist.get_backend(mesh.get_group(name)) for name in ("replicate", "shard")]
    dist.destroy_process_group(mesh.get_group("replicate"))
    dist.destroy_process_group(pair)
    model = torch.nn.Linear(8, 8)
    bagua.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "bytegrad")  # over the same group
    model(torch.ones(1, 8)).sum().backward()
    return told


def test_a_group_is_one_of_torchs(pool: RankPool) -> None:
    for told in pool.run(2, live, backend="bagua:int4"):
        assert told == ["bagua:int4", "gloo", "bagua", "gloo"]


def hooked() -> list[str]:
    group: Any = dist.group.WORLD
    seen: list[str] = []
    group.register_pre_hook(1, lambda call: seen.append(call.name.name))
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(3), 0)
    group.unregister_pre_hook(1)
    dist.all_reduce(torch.ones(3))
    return seen


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="torch before 2.15")
def test_hooks_of_torch_see_what_is_passed_on(pool: RankPool) -> None:
    assert pool.run(2, hooked, backend="bagua:uint8") == [["ALLREDUCE", "BROADCAST"]] * 2


def other_ranks() -> tuple[bool, str]:
    group: Any = dist.group.WORLD
    with pytest.raises(RuntimeError) as caught:
        group.reconfigure(None)
    return group.supports_reconfigure, str(caught.value)


def test_a_group_keeps_its_ranks(pool: RankPool) -> None:
    for supported, message in pool.run(2, other_ranks, backend="bagua:uint8"):
        assert not supported and message.startswith("backend 'bagua': its groups cannot be given other ranks")


def by_device() -> str:
    dist.all_reduce(torch.ones(20_000))
    assert isinstance(dist.group.WORLD, CompressedProcessGroup)
    return dist.group.WORLD.spec.codec.name


def test_a_name_for_one_device(pool: RankPool) -> None:
    assert pool.run(2, by_device, backend="cpu:bagua_fp16") == ["fp16"] * 2


NO_COLLECTIVES = {
    *("abort", "boxed", "bound_device_id", "get_group_store", "group_desc", "group_name", "merge_remote_group", "name"),
    *("rank", "set_timeout", "shutdown", "size", "split_group", "unbox", "use_pg_for_symm_mem_rendezvous"),
    *("get_backend", "supports_abort_hooks", "supports_completion_hooks", "supports_window"),
}


def test_no_collective_runs_in_the_base_class() -> None:
    """There it would hold the GIL, which a thread of gloo that frees a tensor waits for."""
    kinds = set(dist.ProcessGroup.BackendType.__members__)
    public = {name for name in dir(dist.ProcessGroup) if name[0] != "_"} - kinds - {"BackendType"} - NO_COLLECTIVES
    public |= {"_allgather_base", "_reduce_scatter_base"}
    assert {"allreduce", "allgather", "alltoall_base", "barrier", "send"} <= public
    assert public <= set(vars(CompressedProcessGroup)), public - set(vars(CompressedProcessGroup))
