"""Starting, ending and starting again."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from bagua.comm import world
from bagua.comm.launchers import environment_at_start
from tests.rank_pool import RankPool

VARIABLES = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("NODE_RANK", "NNODES", "PET_NNODES", "TORCHELASTIC_RUN_ID"),
)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    bagua.destroy_process_group()


def train_alone() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert bagua.stats(model).steps == 1
    bagua.detach(model)


def test_alone_without_any_environment() -> None:
    for _ in range(3):
        bagua.init_process_group()
        assert dist.get_world_size() == 1
        train_alone()
        bagua.destroy_process_group()
        assert not dist.is_initialized()
    bagua.destroy_process_group()


def test_twice_is_once() -> None:
    bagua.init_process_group()
    group = dist.group.WORLD
    bagua.init_process_group()
    bagua.init_process_group("gloo")
    assert dist.group.WORLD is group
    with pytest.raises(ValueError, match=r"backend: .*'gloo'.*'nccl'.*destroy_process_group"):
        bagua.init_process_group("nccl")


def test_a_group_that_torch_made_is_fine() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bagua.init_process_group()
    train_alone()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_incomplete_environment(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    if missing in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        with pytest.raises(ValueError, match=f"{missing} not set"):
            bagua.init_process_group()


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"MASTER_ADDR": "job-0.svc", "MASTER_PORT": "29500"}, "MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_ADDR": "job-0.svc"}, "MASTER_ADDR"),
        ({"MASTER_PORT": "29500", "LOCAL_RANK": "0"}, "MASTER_PORT, LOCAL_RANK"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE, LOCAL_RANK"),
        ({"NODE_RANK": "0", "NNODES": "2"}, "NODE_RANK, NNODES"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "node0"}, "PET_NNODES"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES"),
    ],
)
def test_a_part_of_a_launcher_s_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], named: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "environment_at_start", lambda: dict(os.environ))
    with pytest.raises(ValueError, match=f"RANK, .*not set in the environment, which has {named}; .*torchrun"):
        bagua.init_process_group()


@pytest.mark.parametrize(
    ("environment", "warned"),
    [
        ({"PET_NNODES": "1", "PET_MASTER_ADDR": "node0", "PET_NPROC_PER_NODE": "auto", "NODE_RANK": "0"}, ""),
        ({"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "1", "NNODES": "1", "MASTER_ADDR": ""}, ""),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0"),
        ({"NNODES": "4"}, "NNODES=4"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "MASTER_ADDR": "gpu-07"}, "MASTER_ADDR=gpu-07"),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=1, LOCAL_WORLD_SIZE=2"),
    ],
    ids=lambda each: "" if isinstance(each, str) else "+".join(each),
)
def test_what_a_process_that_is_alone_may_have(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, environment: dict[str, str], warned: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "environment_at_start", lambda: dict(os.environ))
    bagua.init_process_group()
    assert dist.get_world_size() == 1
    assert (f"the environment has {warned}, but neither RANK" in caplog.text) == bool(warned)


def test_what_another_library_has_set_in_this_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Lightning leaves it behind, which removes `WORLD_SIZE` only."""
    leftovers = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711", "NODE_RANK": "0", "LOCAL_RANK": "0"}
    for name, value in leftovers.items():
        monkeypatch.setenv(name, value)
    bagua.init_process_group()
    assert dist.get_world_size() == 1
    assert "this process trains alone" in caplog.text
    assert environment_at_start().get("PATH") == os.environ.get("PATH")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RANK", "2", "RANK=2 .*expected 0 to 1, as WORLD_SIZE=2"),
        ("RANK", "-1", "RANK=-1"),
        ("RANK", "x", "RANK='x' .*integer"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0"),
        ("WORLD_SIZE", "", "WORLD_SIZE='' .*integer"),
        ("MASTER_PORT", "http", "MASTER_PORT='http' .*integer"),
    ],
)
def test_wrong_numbers_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, text in {**environment, variable: value}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=message):
        bagua.init_process_group()


@pytest.mark.parametrize(
    ("resolved", "told", "problem", "chosen"),
    [
        ("10.0.0.1", "10.0.0.1", "", None),
        ("10.0.0.1", "10.0.0.1", "is 127.0.1.1", "eth of 10.0.0.1"),
        ("127.0.1.1", "10.0.0.7", "is 127.0.1.1", "eth of 10.0.0.7"),  # rank 0, whose name MASTER_ADDR is
        ("127.0.0.1", "127.0.0.1", "is 127.0.1.1", None),  # all on one host
    ],
)
def test_the_interface_where_the_own_name_is_loopback(
    resolved: str, told: str, problem: str, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    monkeypatch.setattr(os, "environ", {**environment, "MASTER_ADDR": "node0"})
    monkeypatch.setattr(world, "name_problem", lambda: problem)
    monkeypatch.setattr(world, "address_towards", lambda host: host)
    monkeypatch.setattr(world, "interface_of", lambda address: f"eth of {address}")
    store = dist.HashStore()
    monkeypatch.setattr(world, "first_address", lambda host: told)
    world._choose_interface(store, 1, 2)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    monkeypatch.setattr(world, "first_address", lambda host: resolved)
    world._choose_interface(store, 0, 2)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen
    if chosen:
        del os.environ["GLOO_SOCKET_IFNAME"]
        monkeypatch.setattr(world, "interface_of", lambda address: None)
        with pytest.raises(RuntimeError, match=r"rank 0: is 127.0.1.1, and no .*; set GLOO_SOCKET_IFNAME to"):
            world._choose_interface(store, 0, 2)


def again_and_again(port: int) -> list[float]:
    """Three worlds after one another over one address, without any pause in between."""
    found = []
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    os.environ.update({"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": os.environ["LOCAL_WORLD_SIZE"]})
    for number in range(3):
        bagua.init_process_group(timeout=timedelta(seconds=20))
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, "bytegrad")
        model(torch.full((1, 2), float(dist.get_rank() + number))).sum().backward()
        assert model.weight.grad is not None
        found.append(model.weight.grad[0, 0].item())
        bagua.destroy_process_group()
    return found


def test_restart_in_the_same_processes(pool: RankPool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # picks a port that is free
    port = store.port
    del store
    for found in pool.run(3, again_and_again, port, init=False):
        assert found == pytest.approx([1.0, 2.0, 3.0], abs=0.02)


def subgroups() -> list[float]:
    """Two groups train two models at the same time, and a third model is trained by all."""
    rank = dist.get_rank()
    mine = None
    for ranks in ([0, 1], [2, 3]):
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    found = []
    for process_group in (mine, None):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, process_group=process_group)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 2), float(rank))).sum().backward()
        assert model.weight.grad is not None
        found.append(model.weight.grad[0, 0].item())
    return found


def test_subgroups(pool: RankPool) -> None:
    assert pool.run(4, subgroups) == [[0.5, 1.5], [0.5, 1.5], [2.5, 1.5], [2.5, 1.5]]


def outsider() -> str:
    group = dist.new_group([0])
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        bagua.distribute(model, optimizer, process_group=group)
        return ""
    with pytest.raises((ValueError, TypeError)) as error:
        bagua.distribute(model, optimizer, process_group=dist.GroupMember.NON_GROUP_MEMBER)
    return str(error.value)


def test_not_a_member(pool: RankPool) -> None:
    assert "process_group" in pool.run(2, outsider)[1]


def over_a_mesh() -> list[float]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    found = []
    for name in ("outer", "inner"):
        model = nn.Linear(2, 1)
        bagua.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), process_group=mesh[name])
        model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        assert model.weight.grad is not None
        found.append(model.weight.grad[0, 0].item())
    with pytest.raises(ValueError, match="one dimension"):
        bagua.distribute(nn.Linear(2, 1), [], process_group=mesh)
    return found


def test_device_mesh(pool: RankPool) -> None:
    assert pool.run(4, over_a_mesh) == [[1.0, 0.5], [2.0, 0.5], [1.0, 2.5], [2.0, 2.5]]


class Late(dist.Store):
    """Hands every call on; rank 1 learns late where rank 2 listens."""

    def __init__(self, store: dist.Store, rank: int, first_left: Path) -> None:
        super().__init__()
        self._store, self._rank, self._first_left = store, rank, first_left

    def set(self, key: str, value: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._store.set(key, value)

    def get(self, key: str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        deadline = time.monotonic() + 0.4  # in vain, if rank 0 waits for rank 1
        while self._rank == 1 and key.endswith("/2") and time.monotonic() < deadline and not self._first_left.exists():
            time.sleep(0.005)
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._store.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._store.wait(keys, timeout)


def begin_and_end(path: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    for number in range(6):  # who connects to whom is drawn anew in each round
        left = Path(path, f"left{number}")
        store = Late(dist.FileStore(f"{path}/{number}", 3), rank, left)
        bagua.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
        bagua.destroy_process_group()
        if rank == 0:
            left.touch()


def test_a_rank_that_ends_at_once_does_not_break_one_that_still_connects(pool: RankPool, tmp_path: Path) -> None:
    pool.run(3, begin_and_end, str(tmp_path), init=False)
