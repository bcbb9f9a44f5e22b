"""A cached dataset gives what the dataset gives, however it is read."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from bagua.data import CachedDataset, CacheLoader
from bagua.data.cache.outline import outline_of
from bagua.data.cache.redis_host import RedisHost
from tests.rank_pool import RankPool

pytestmark = pytest.mark.process

NEAR = {"MASTER_ADDR": "127.0.0.1"}


class Squares(Dataset[Any]):
    """Counts what it computes, over all processes, in a file."""

    def __init__(self, log: Path, size: int = 102) -> None:
        self.log, self.size = log, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        with open(self.log, "ab", buffering=0) as file:
            file.write(b".")
        return {"x": torch.full((50, 10), float(index)), "y": index**2, "name": f"sample {index}"}

    @property
    def num_computed(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0


@pytest.fixture
def squares(tmp_path: Path) -> Squares:
    return Squares(tmp_path / "log")


def first(batch: Sequence[Any]) -> Any:
    """Collate, and tell the process."""
    return {**default_collate(list(batch)), "pid": os.getpid()}


def read(loader: DataLoader[Any], size: int) -> set[int]:
    """Check an epoch; return the processes that took part."""
    seen, pids = [], set()
    for batch in loader:
        for x, y, name in zip(batch["x"], batch["y"], batch["name"], strict=True):
            number = int(x[0, 0])
            assert torch.equal(x, torch.full((50, 10), float(number)))
            assert int(y) == number**2 and name == f"sample {number}"
            seen.append(number)
        pids.add(batch["pid"])
    assert sorted(seen) == list(range(size))
    return pids


def options(backend: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    if backend == "lmdb":
        return {"path": request.getfixturevalue("cache_path")}
    return {"hosts": request.getfixturevalue("hosts")} if backend == "redis" else {}


@pytest.mark.parametrize("backend", ["memory", "lmdb", "redis"])
def test_epochs_and_several_datasets_in_one_store(
    backend: str, squares: Squares, request: pytest.FixtureRequest
) -> None:
    kw = options(backend, request)
    one = CachedDataset(squares, backend, "one", **kw)
    for _ in range(3):
        read(DataLoader(one, batch_size=8, shuffle=True, collate_fn=first), 102)
    assert squares.num_computed == 102
    assert one.cache_loader.num_keys() == 102
    assert (one.stats.num_hits, one.stats.num_misses, one.stats.num_damaged) == (204, 102, 0)
    two = CachedDataset(squares, backend, "two", **kw)
    assert [two[i]["y"] for i in range(len(two))] == [i**2 for i in range(102)]
    assert two.cache_loader.num_keys() == one.cache_loader.num_keys() == 204
    assert squares.num_computed == 204


@pytest.mark.parametrize("backend", ["memory", "lmdb", "redis"])
def test_two_datasets_of_one_name_in_one_store_are_refused(
    backend: str, squares: Squares, request: pytest.FixtureRequest
) -> None:
    kw = options(backend, request)
    train = CachedDataset(squares, backend, **kw)
    with pytest.raises(ValueError, match="dataset_name: '' is in use"):
        CachedDataset(Squares(squares.log, 7), backend, **kw)
    with pytest.raises(ValueError, match="dataset_name"):
        CachedDataset([1, 2], backend, **kw)
    val = CachedDataset([1, 2], backend, "val", **kw)
    assert train[0]["y"] == 0 and val[0] == 1
    again, equal = CachedDataset(squares, backend, **kw), CachedDataset(Squares(squares.log), backend, **kw)
    assert again[3]["y"] == equal[3]["y"] == 9
    del again, equal
    with pytest.raises(ValueError, match="dataset_name"):
        CachedDataset([1, 2], backend, **kw)
    del train
    with pytest.raises(ValueError, match="was used in this process for another dataset"):
        CachedDataset([1, 2], backend, **kw)
    same = CachedDataset(Squares(squares.log), backend, **kw)
    same.cache_loader.clear()
    del same
    assert CachedDataset([1, 2], backend, **kw)[0] == 1


@pytest.mark.parametrize("backend", ["memory", "lmdb", "redis"])
def test_folds_that_are_released_one_by_one_do_not_share_samples(backend: str, request: pytest.FixtureRequest) -> None:
    kw, full = options(backend, request), TensorDataset(torch.arange(8.0))

    def samples(fold: int, name: str) -> list[float]:
        half = CachedDataset(Subset(full, range(4 * fold, 4 * fold + 4)), backend, name, **kw)
        return [half[index][0].item() for index in range(4)]

    assert samples(0, "") == samples(0, "") == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="dataset_name: '' was used"):
        samples(1, "")
    assert samples(1, "fold 1") == [4, 5, 6, 7]


def test_a_store_that_was_closed_or_removed_has_no_claims(tmp_path: Path) -> None:
    CachedDataset([1, 2], "memory")[0]
    CachedDataset([1, 2], "memory").close()
    assert CachedDataset([3, 4], "memory")[0] == 3
    CachedDataset([1, 2], "lmdb", path=tmp_path / "store")[0]
    closed = CachedDataset([1, 2], "lmdb", path=tmp_path / "store")
    closed.close()
    del closed
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").mkdir()
    assert CachedDataset([3, 4], "lmdb", path=tmp_path / "store")[0] == 3


class Unpicklable(Dataset[int]):
    def __init__(self, size: int, table: Any) -> None:
        self.lock, self.table, self.size = threading.Lock(), table, size

    def __getitem__(self, index: int) -> int:
        return index


def test_an_outline_tells_datasets_apart_without_a_copy_of_them() -> None:
    table, other = torch.arange(1 << 22), torch.arange(1 << 22).flip(0)
    assert outline_of(Unpicklable(3, table)) == outline_of(Unpicklable(3, table.clone()))
    found = {
        outline_of(each)
        for each in (
            Unpicklable(3, table),
            Unpicklable(4, table),
            Unpicklable(3, other),
            Unpicklable(3, table.numpy()),
            Unpicklable(3, other.numpy()),
            Unpicklable(3, table.view(2048, 2048).T),
            Unpicklable(3, list(range(1 << 20))),
            Subset(Unpicklable(3, table), [0]),
            Subset(Unpicklable(3, table), [1]),
            [0, 1],
            [0, 2],
        )
    }
    assert len(found) == 11


def with_workers(squares: Squares, backend: str, method: str, kw: dict[str, Any]) -> None:
    cached = CachedDataset(squares, backend, **kw)
    assert cached[0]["y"] == 0  # the store is open in this process, and its threads run, when workers start
    for persistent in (True, False):
        loader: DataLoader[Any] = DataLoader(
            cached,
            batch_size=8,
            shuffle=True,
            num_workers=2,
            persistent_workers=persistent,
            multiprocessing_context=method,
            collate_fn=first,
        )
        for _ in range(2):
            pids = read(loader, 102)
            assert os.getpid() not in pids
        del loader
    # In the first epoch all is computed; of a later one no more than what persistent workers had not written yet.
    assert 102 <= squares.num_computed < 150
    assert cached.cache_loader.num_keys() == 102
    before = squares.num_computed
    read(DataLoader(cached, batch_size=8, collate_fn=first), 102)
    assert squares.num_computed == before


@pytest.mark.parametrize("backend", ["lmdb", "redis"])
def test_forked_workers(backend: str, squares: Squares, request: pytest.FixtureRequest, pool: RankPool) -> None:
    pool.run(1, with_workers, squares, backend, "fork", options(backend, request), init=False, fresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("backend", ["lmdb", "redis"])
def test_started_workers(backend: str, method: str, squares: Squares, request: pytest.FixtureRequest) -> None:
    with_workers(squares, backend, method, options(backend, request))


def test_workers_write_what_they_hold_when_they_end(squares: Squares, cache_path: Path, pool: RankPool) -> None:
    pool.run(1, write_at_the_end, squares, cache_path, init=False, fresh=True)


def write_at_the_end(squares: Squares, cache_path: Path) -> None:
    cached = CachedDataset(squares, "lmdb", writer_buffer_size=10_000, path=cache_path)
    loader: DataLoader[Any] = DataLoader(cached, num_workers=2, multiprocessing_context="fork", collate_fn=first)
    read(loader, 102)
    assert cached.cache_loader.num_keys() == 102


def half_of_it(cached: CachedDataset, rank: int, size: int) -> int:
    for index in range(rank, len(cached), size):
        assert cached[index]["y"] == index**2
    cached.flush()
    return cached.cache_loader.num_keys()


def all_of_it(cached: CachedDataset) -> tuple[int, int]:
    assert [sample["y"] for sample in cached.__getitems__(range(len(cached)))] == [i**2 for i in range(len(cached))]
    return cached.stats.num_hits, cached.stats.num_misses


def work(cached: CachedDataset) -> Any:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    half_of_it(cached, rank, size)
    dist.barrier()
    before = cached.stats.num_hits
    hits, misses = all_of_it(cached)
    cached.close()
    return hits - before, misses


@pytest.mark.parametrize("backend", ["lmdb", "redis"])
def test_ranks_share_what_they_computed(
    backend: str, squares: Squares, pool: RankPool, request: pytest.FixtureRequest
) -> None:
    """The dataset travels to other processes, as it does to spawned workers."""
    cached = CachedDataset(squares, backend, **options(backend, request))
    assert pool.run(2, work, cached) == [(102, 51), (102, 51)]
    assert squares.num_computed == 102


def servers_of_the_job(log: str) -> Any:
    import torch.distributed as dist

    from bagua.data.cache import job_servers
    from bagua.data.cache.client import close_all

    cached = CachedDataset(Squares(Path(log)), "redis", capacity_per_node=8 << 20)
    again = CachedDataset(Squares(Path(log)), "redis", "again", capacity_per_node=8 << 20)
    assert cached.cache_loader._backend == again.cache_loader._backend
    own = CachedDataset(Squares(Path(log)), "redis", "own", capacity_per_node=8 << 20, cluster_mode=False)
    names = sorted(host.name for host in cached.cache_loader._backend.hosts)  # pyright: ignore
    (mine,) = own.cache_loader._backend.hosts  # pyright: ignore
    result = work(cached)
    dist.barrier()
    started = len(job_servers._mine)
    close_all()
    return names, mine.name, started, result


def test_a_server_on_each_node_shared_by_the_job(pool: RankPool, tmp_path: Path, servers: list[Any]) -> None:
    outcomes = pool.run(4, servers_of_the_job, str(tmp_path / "log"), nodes=[0, 0, 1, 1], env=NEAR)
    names = outcomes[0][0]
    assert len(names) == 2 and all(outcome[0] == names for outcome in outcomes)
    assert outcomes[0][1] == outcomes[1][1] != outcomes[2][1] == outcomes[3][1]
    assert [outcome[2] for outcome in outcomes] == [1, 0, 1, 0]
    assert [outcome[3][0] for outcome in outcomes] == [102] * 4
    assert (tmp_path / "log").stat().st_size == 102


def no_program() -> str:
    os.environ["PATH"] = ""
    with pytest.raises(RuntimeError, match=r"rank 0: .*neither redis-server.*; rank 1: .*neither") as caught:
        CachedDataset([1], "redis")
    return str(caught.value)


def test_a_server_that_cannot_start_is_an_error_on_all_ranks(pool: RankPool) -> None:
    first, second = pool.run(2, no_program, nodes=[0, 1], env=NEAR)
    assert first == second


def test_several_ranks_without_a_process_group(monkeypatch: pytest.MonkeyPatch, servers: list[Any]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        CachedDataset([1], "redis")


def test_batches_go_to_a_dataset_that_takes_batches(squares: Squares) -> None:
    asked: list[list[int]] = []

    class Batched(Squares):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return [self[index] for index in indices]

    cached = CachedDataset(Batched(squares.log), "memory")
    assert [s["y"] for s in cached.__getitems__([1, 2])] == [1, 4]
    assert [s["y"] for s in cached.__getitems__([2, 3, 1])] == [4, 9, 1]
    assert asked == [[1, 2], [3]]


def test_what_the_dataset_raises_is_raised_and_not_cached(squares: Squares) -> None:
    cached = CachedDataset(squares, "memory")
    with pytest.raises(IndexError):
        cached[102]
    assert cached.cache_loader.num_keys() == 0
    assert len(list(iter(cached[i] for i in range(3)))) == 3


def test_indices_of_any_kind_are_one_key() -> None:
    numpy = pytest.importorskip("numpy")
    cached = CachedDataset(["a", "b"], "memory")
    assert [cached[i] for i in (1, numpy.int64(1), torch.tensor(1), True)] == ["b"] * 4
    assert cached.cache_loader.num_keys() == 1
    by_name = CachedDataset({"k": 5}, "memory", "names")
    assert by_name["k"] == by_name["k"] == 5
    with pytest.raises(TypeError, match="index"):
        cached[1.5]


def test_samples_without_a_plain_form_are_refused_or_pickled_by_choice() -> None:
    with pytest.raises(TypeError, match=r'sample\[0\]: a .*range.*serializer="pickle"'):
        CachedDataset([(range(3),)], "memory")[0]
    pickled = CachedDataset([(range(3),)], "memory", "p", serializer="pickle")
    assert pickled[0] == (range(3),)
    pickled.flush()
    assert pickled[0] == (range(3),) and pickled.stats.num_hits == 1


def test_a_closed_dataset_opens_again(squares: Squares, cache_path: Path) -> None:
    cached = CachedDataset(squares, "lmdb", path=cache_path)
    cached[3]
    cached.close()
    assert cached[3]["y"] == 9 and squares.num_computed == 1


def test_a_dataset_is_pickled_without_its_connections(squares: Squares, cache_path: Path) -> None:
    cached = CachedDataset(squares, "lmdb", path=cache_path)
    cached[3]
    copy = pickle.loads(pickle.dumps(cached))
    assert copy.stats.num_misses == 0 and copy[3]["y"] == 9
    assert squares.num_computed == 1


def test_get_and_num_keys() -> None:
    loader = CacheLoader("memory", "name")
    calls: list[Any] = []
    for _ in range(2):
        for key in ("a", 1, b"raw"):
            assert loader.get(key, lambda key: calls.append(key) or str(key)) == str(key)
    assert calls == ["a", 1, b"raw"] and loader.num_keys() == 3
    with pytest.raises(ValueError, match="load_fn: returned 1 samples for 2 keys"):
        loader.get_many([5, 6], lambda keys: [1])
    loader.clear()
    assert loader.num_keys() == 0


class Endless(IterableDataset[int]):
    """Has no samples to ask for."""

    def __iter__(self) -> Iterator[int]:
        yield 1

    def __repr__(self) -> str:
        return "Endless()"  # in the name of a test, which must not change from run to run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "memcached"}, "backend: 'memcached' is unknown; available: lmdb, memory, redis"),
        ({"dataset_name": 3}, "dataset_name"),
        ({"writer_buffer_size": 0}, "writer_buffer_size"),
        ({"serializer": "json"}, "serializer: 'json'"),
        ({"backend": "memory", "path": "x"}, "no option path; its options: zero_copy"),
        ({"backend": "redis", "hosts": ["redis://a"], "capacity_per_node": 1 << 30}, "capacity_per_node"),
        ({"backend": "redis", "hosts": ["redis://a"], "interface": "lo"}, "interface"),
        ({"backend": "redis", "interface": "0.0.0.0"}, "every interface"),
        ({"dataset": iter}, "dataset"),
        ({"dataset": Endless()}, "dataset"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str, servers: list[Any]) -> None:
    pytest.importorskip("lmdb")
    with pytest.raises((TypeError, ValueError), match=message):
        CachedDataset(**{"dataset": [1], **arguments})


@pytest.mark.parametrize("package", ["lmdb", "redis"])
def test_a_package_that_is_not_installed_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}: pip install 'bagua\[cache\]'"):
        CachedDataset([1], package)
    assert CachedDataset([1], "memory")[0] == 1


def test_one_server_of_several_without_cluster_mode(hosts: list[RedisHost], monkeypatch: pytest.MonkeyPatch) -> None:
    for node, host in ((0, hosts[0]), (1, hosts[1]), (2, hosts[0])):
        monkeypatch.setenv("GROUP_RANK", str(node))
        loader = CacheLoader("redis", hosts=hosts, cluster_mode=False)
        assert loader._backend.hosts == (host,)  # pyright: ignore
