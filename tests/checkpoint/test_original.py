"""`save_checkpoint` and `load_checkpoint` of the facade, and files as the original wrote them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bagua.checkpoint import CheckpointError, archive
from bagua.torch_api.checkpoint import checkpointing, load_checkpoint, save_checkpoint
from tests.engine.training import equal
from tests.fork_server import ForkServer
from tests.rank_pool import RankPool


def parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, seed + 1)


def states(given: tuple[Any, ...]) -> list[Any]:
    return [each.state_dict() for each in given]


def write_original(path: Path, iteration: int, given: tuple[Any, ...]) -> None:
    """Exactly the files of the original, written with its own calls."""
    folder = path / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    model, optimizer, scheduler = states(given)
    saved = {"iteration": iteration, "model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    torch.save(saved, folder / "mp_rank_00_model_states.pt")
    (path / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def test_the_old_layout_is_read(tmp_path: Path) -> None:
    old, fresh = parts(1), parts(2)
    write_original(tmp_path, 120, old)
    assert load_checkpoint(str(tmp_path), *fresh) == 120
    assert equal(states(fresh), states(old))


def test_the_old_layout_is_written(tmp_path: Path) -> None:
    old, fresh = parts(1), parts(2)
    assert load_checkpoint(str(tmp_path), *fresh) == 0
    save_checkpoint(7, str(tmp_path), *parts(3))
    checkpointing.save_checkpoint(120, str(tmp_path), *old)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "120"
    saved = torch.load(tmp_path / "iter_0000120" / "mp_rank_00_model_states.pt", weights_only=True)
    assert saved["iteration"] == 120 and equal(saved["model"], old[0].state_dict())
    assert equal([saved["optimizer"], saved["lr_scheduler"]], states(old[1:]))
    assert load_checkpoint(str(tmp_path), *fresh) == 120
    assert equal(states(fresh), states(old))
    save_checkpoint(120, str(tmp_path), *fresh)  # the same iteration once more
    assert load_checkpoint(str(tmp_path), fresh[0]) == 120


@pytest.mark.parametrize("strict", [True, False])
def test_strict_acts(strict: bool, tmp_path: Path) -> None:
    save_checkpoint(3, str(tmp_path), parts(1)[0])
    other = nn.Sequential(nn.Linear(4, 2))
    if strict:
        with pytest.raises(RuntimeError, match="Missing key"):
            load_checkpoint(str(tmp_path), other)
    else:
        assert load_checkpoint(str(tmp_path), other, strict=False) == 3


@pytest.mark.parametrize(
    "content", [b"", b"-1", b"latest", b"12 13", b"\xff\xfe\x8012"], ids=["none", "negative", "word", "two", "binary"]
)
def test_a_damaged_tracker_is_an_error(content: bytes, tmp_path: Path) -> None:
    write_original(tmp_path, 5, parts(1))
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(content)
    with pytest.raises(CheckpointError, match="expected an iteration or 'release'"):
        load_checkpoint(str(tmp_path), *parts(2))


def refused(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, parts(2)[0])
    return str(caught.value)


def test_what_rank_0_cannot_read_is_an_error_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(2, refused, f"{tmp_path}\0", group_timeout_s=8):
        assert "rank 0 of 2: ValueError: " in said and "null byte" in said
    write_original(tmp_path, 5, parts(1))
    (tmp_path / "iter_0000005" / "bagua").write_text("a file in the place of a directory")
    for said in pool.run(2, refused, str(tmp_path), group_timeout_s=8):
        assert "rank 0 of 2: NotADirectoryError: " in said


def test_release_is_a_directory_of_its_own(tmp_path: Path) -> None:
    old, fresh = parts(1), parts(2)
    write_original(tmp_path, 5, old)
    (tmp_path / "iter_0000005").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert load_checkpoint(str(tmp_path), *fresh) == 0
    assert equal(states(fresh), states(old))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    old = parts(1)
    write_original(tmp_path, 5, old)
    file = tmp_path / "iter_0000005" / "mp_rank_00_model_states.pt"
    torch.save({"model": old[0].state_dict()}, file)
    with pytest.raises(CheckpointError, match="holds no optimizer, lr_scheduler"):
        load_checkpoint(str(tmp_path), *parts(2))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(str(tmp_path), parts(2)[0])
    with pytest.raises(ValueError, match="iteration"):
        save_checkpoint(-1, str(tmp_path), old[0])


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(1, str(tmp_path), parts(1)[0])
    monkeypatch.setattr(archive, "_file", lambda item, rank: "/dev/full")
    with pytest.raises(CheckpointError, match=r"rank 0 of 1: OSError: \[Errno 28\] No space left"):
        save_checkpoint(2, str(tmp_path), parts(2)[0])
    assert not [path for path in (tmp_path / "iter_0000002").rglob("*") if path.name != "bagua"]
    assert load_checkpoint(str(tmp_path), parts(2)[0]) == 1


def die_at(pipe: Connection, place: str, path: str, iteration: int) -> None:
    """A save that is killed just before `place`, a file or directory, gets its name."""

    def dying(move: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Any, target: Any) -> None:
            if place in Path(target).name:
                os.kill(os.getpid(), signal.SIGKILL)
            move(source, target)

        return moved

    os.replace, os.rename = dying(os.replace), dying(os.rename)
    save_checkpoint(iteration, path, *parts(iteration))
    pipe.send("not killed")


@pytest.mark.process
def test_what_a_killed_process_left_is_removed(fork_server: ForkServer, tmp_path: Path) -> None:
    def entries() -> list[str]:
        return sorted(path.name for path in tmp_path.rglob("*") if re.match(r"\.|writing", path.name))

    save_checkpoint(10, str(tmp_path), *parts(1))
    mine = tmp_path / "iter_0000020" / ".mp_rank_00_model_states.pt.old"  # of somebody else
    mine.parent.mkdir()
    mine.touch()
    for iteration, place in ((20, "mp_rank_00"), (30, "latest"), (40, "checkpoint-")):
        pipe = fork_server.fork(die_at, place, str(tmp_path), iteration)
        assert pipe.poll(60), "it has not ended"
        with pytest.raises(EOFError):
            pipe.recv()
        assert len(entries()) == 2, "the next save, of whatever iteration, removes what the last one left"
    assert load_checkpoint(str(tmp_path), *parts(2)) == 10
    save_checkpoint(15, str(tmp_path), *parts(1))
    assert entries() == [mine.name]


def test_a_file_that_another_job_removes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def in_between(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        save_checkpoint(7, str(tmp_path), parts(1)[0])
        replace(source, target)

    monkeypatch.setattr(os, "replace", in_between)
    with pytest.raises(CheckpointError, match="was removed while it was written: another job saves in"):
        save_checkpoint(7, str(tmp_path), parts(1)[0])


class Experts(nn.Module):
    """Parameters under the names that the original's mixture of experts gives them."""

    def __init__(self, value: float, num_local: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2)
        self.layer = nn.Module()
        self.layer.bagua_moe = nn.Module()
        self.layer.bagua_moe.experts = nn.Module()
        self.layer.bagua_moe.experts.bagua_experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(num_local))
        for param in self.parameters():
            nn.init.constant_(param, value)


def write_experts(path: Path, num_ranks: int) -> None:
    """As the original: expert e of all holds the value e; each rank's optimizer a learning rate of its own."""
    model = Experts(7.0)
    folder = path / "iter_0000009"
    folder.mkdir(parents=True)
    prefix = "layer.bagua_moe.experts.bagua_experts."
    rest = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefix)}
    torch.save({"iteration": 9, "model": rest}, folder / "mp_rank_00_model_states.pt")
    for expert in range(2 * num_ranks):
        tensors = {f"{prefix}{expert}.{name}": torch.full(shape, float(expert)) for name, shape in SHAPES.items()}
        torch.save(tensors, folder / f"expert_{expert}_mp_rank_00_model_states.pt")
    for rank in range(num_ranks):
        optimizer = torch.optim.SGD(model.parameters(), lr=float(rank + 1))
        state = {"optimizer": optimizer.state_dict()}
        torch.save(state, folder / f"expert_parallel_rank_{rank}_mp_rank_00_optim_states.pt")
    (path / "latest_checkpointed_iteration.txt").write_text("9")


SHAPES = {"weight": (2, 2), "bias": (2,)}


def read_experts(path: str) -> tuple[int, list[float], float]:
    model = Experts(-1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=99.0)
    iteration = load_checkpoint(path, model, optimizer)
    values = [param.unique().item() for param in model.parameters()]
    return iteration, values, optimizer.param_groups[0]["lr"]


def test_experts_of_the_original_are_read_by_rank(pool: RankPool, tmp_path: Path) -> None:
    write_experts(tmp_path, 2)
    for rank, (iteration, values, lr) in enumerate(pool.run(2, read_experts, str(tmp_path))):
        assert (iteration, lr) == (9, rank + 1.0)
        assert values == [7.0, 7.0, 2.0 * rank, 2.0 * rank, 2.0 * rank + 1, 2.0 * rank + 1]
    (tmp_path / "iter_0000009" / "expert_3_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(AssertionError, match="rank 1 of 2: CheckpointError: .*expert_3"):
        pool.run(2, read_experts, str(tmp_path))
