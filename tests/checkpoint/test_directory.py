"""A checkpoint is there whole or not at all, and what is damaged is not taken for whole."""

from __future__ import annotations

import collections
import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua
from bagua.checkpoint import CheckpointError, archive, load, save, steps
from bagua.checkpoint.archive import read_last, save_packed
from bagua.checkpoint.directory import Manifest, publish, reserve, write_file
from bagua.comm.team import Team
from tests.checkpoint.kill_points import sweep
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_leaves_what_was_there(stride: int, pool: RankPool, tmp_path: Path) -> None:
    (report,) = pool.run(1, sweep, str(tmp_path), stride, init=False, fresh=True, timeout_s=120)
    assert not [wrong for *_, wrong in report if wrong]
    moved_on = [after - before for before, after, _ in report]
    assert moved_on.count(0) * stride > 100, "killed before the new one was complete"
    assert moved_on.count(1) * stride > 8, "killed while old ones were removed, or not at all"


def model() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(4, 2)


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        path = save(tmp_path, {"model": model()}, step=step, keep=3)
        assert path.name == f"checkpoint-{step + 1:06d}-step-{step}"
    assert steps(tmp_path) == (2, 3, 4)
    save(tmp_path, {"model": model()}, step=5, keep=None)
    assert steps(tmp_path) == (2, 3, 4, 5)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("checkpoint-")]


def test_what_was_saved_last_is_found_first_although_its_step_is_lower(tmp_path: Path) -> None:
    save(tmp_path, {"epoch": 1}, step=100)
    save(tmp_path, {"epoch": 2}, step=50)
    loaded = load(tmp_path, {})
    assert loaded is not None and (loaded.step, loaded.data, loaded.size) == (50, {"epoch": 2}, 1)
    loaded = load(tmp_path, {}, step=100)
    assert loaded is not None and loaded.data == {"epoch": 1}
    with pytest.raises(CheckpointError, match="no checkpoint of step 70; it has 100, 50"):
        load(tmp_path, {}, step=70)


def test_nothing_there(tmp_path: Path) -> None:
    assert load(tmp_path / "nowhere", {"model": model()}) is None
    assert steps(tmp_path / "nowhere") == ()
    with pytest.raises(CheckpointError, match="it has no checkpoint"):
        load(tmp_path, {}, step=1)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def claim(path: Path) -> None:
    manifest = path.parent / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace("model-00000.pt", "../../model-00000.pt"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [(cut, "were written"), (flip, "checksum"), (Path.unlink, "cannot be read"), (claim, "out of place")],
)
def test_damage_is_noticed(damage: Any, message: str, tmp_path: Path) -> None:
    path = save(tmp_path, {"model": model()}, step=1)
    damage(path / "model-00000.pt")
    fresh = model()
    with torch.no_grad():
        fresh.weight.zero_()
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, {"model": fresh})
    assert "rank 0 of 1" in str(caught.value)
    assert not fresh.weight.any(), "something was loaded"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "step": 1, "size": 1}'])
def test_a_damaged_manifest_is_noticed(text: str, tmp_path: Path) -> None:
    path = save(tmp_path, {"model": model()}, step=1)
    (path / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"checkpoint.json: (damaged|version 2)"):
        load(tmp_path, {"model": model()})


def of_no_ranks(manifest: Path) -> None:
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"size": 0, "files": {item: [] for item in content["files"]}}))


def of_infinite_size(manifest: Path) -> None:
    manifest.write_text(manifest.read_text().replace('"size": 1', '"size": Infinity'))


@pytest.mark.parametrize("damage", [of_no_ranks, of_infinite_size])
def test_a_manifest_of_impossible_size_is_noticed(damage: Any, tmp_path: Path) -> None:
    path = save(tmp_path, {"model": model()}, step=1)
    damage(path / "checkpoint.json")
    with pytest.raises(CheckpointError, match="checkpoint.json: damaged"):
        load(tmp_path, {"model": model()})


def test_the_error_of_a_damaged_checkpoint_names_the_one_before(tmp_path: Path) -> None:
    paths = [save(tmp_path, {"model": model()}, step=step, keep=None) for step in (2, 4, 6, 6)]

    def error_of(step: int | None = None) -> str:
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path, {"model": model()}, step=step)
        return str(caught.value).partition("; ")[2]

    flip(paths[3] / "model-00000.pt")
    assert error_of() == f"{paths[2].name}, saved before it, has all its files: move {paths[3].name} away"
    cut(paths[2] / "model-00000.pt")
    cut(paths[3] / "checkpoint.json")
    told = f"{paths[1].name}, saved before it, has all its files: load with step=4, or move {paths[3].name} away"
    assert error_of() == told
    loaded = load(tmp_path, {"model": model()}, step=4)
    assert loaded is not None and loaded.path == paths[1]
    (paths[1] / "model-00000.pt").unlink()
    flip(paths[0] / "model-00000.pt")
    assert "step=2" in error_of() and error_of(2) == ""
    with pytest.raises(CheckpointError, match="has no 'other'; it holds model$"):
        load(tmp_path, {"other": model()}, step=2)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_a_file_that_names_a_class_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "load", lambda *args, **options: None)  # let save() through
    path = save(tmp_path, {"epoch": Evil()}, step=1)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        load(tmp_path, {})
    assert not (tmp_path / "evil").exists()
    assert path.exists()


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    save(tmp_path, {"epoch": 1}, step=1)
    with pytest.raises(CheckpointError, match=r"rank 0 of 1: CheckpointError: epoch-00000.pt: holds something"):
        save(tmp_path, {"epoch": Evil()}, step=2)
    with pytest.raises(CheckpointError, match="rank 0 of 1"):
        save(tmp_path, {"epoch": lambda: 0}, step=2)
    assert steps(tmp_path) == (1,)
    counts = collections.Counter([1, 1, 2])
    save(tmp_path, {"counts": counts, "mixed": [(1, None), {"a": torch.ones(2)}, "text", b"x", 1.5]}, step=2)
    loaded = load(tmp_path, {})
    assert loaded is not None and loaded.data["counts"] == counts and loaded.data["mixed"][0] == (1, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"keep": 0}, "keep"),
        ({"objects": {"a b": 1}}, "'a b' is not a valid name"),
        ({"objects": {"model.bagua": 1}}, "is not a valid name"),
        ({"objects": [1]}, "objects"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"objects": {"epoch": 1}, "step": 1, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        save(tmp_path, options.pop("objects"), **options)
    assert not list(tmp_path.iterdir())


def test_what_is_not_in_it_is_named(tmp_path: Path) -> None:
    net = model()
    save(tmp_path, {"model": net, "epoch": 1}, step=1)
    with pytest.raises(CheckpointError, match="has no 'optimizer'; it holds model, epoch"):
        load(tmp_path, {"model": model(), "optimizer": torch.optim.SGD(net.parameters(), lr=1)})
    with pytest.raises(CheckpointError, match="'model' was saved as 'module' but is 'data' now"):
        load(tmp_path, {"model": 1})


def full_disk(monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
    """For the items named "full", which a rank is to write."""
    file_of = archive._file

    def place(item: str, writer: int) -> str:
        return "/dev/full" if (item, writer) == ("full", rank) else file_of(item, writer)

    monkeypatch.setattr(archive, "_file", place)


@pytest.mark.parametrize("length", [10, 10**6], ids=["at_the_end", "on_the_way"])
def test_a_full_disk_is_named_and_does_not_stay_full(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, {"epoch": 1}, step=1)
    before = sorted(tmp_path.rglob("*"))
    full_disk(monkeypatch)
    with pytest.raises(CheckpointError, match=r"rank 0 of 1: OSError: \[Errno 28\] No space left.*: '/dev/full'"):
        save(tmp_path, {"epoch": 2, "full": torch.ones(length)}, step=2)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.undo()
    save(tmp_path, {"epoch": 2, "full": torch.ones(length)}, step=2)
    assert steps(tmp_path) == (1, 2)


def test_a_file_that_cannot_be_read_back_is_no_problem_of_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_of_torch(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(torch, "load", load_of_torch)
    with pytest.raises(CheckpointError, match=r"rank 0 of 1: OSError: \[Errno 5\] Input/output error"):
        save(tmp_path, {"epoch": 1}, step=1)


@pytest.mark.parametrize("first", ["removal", "publication"])
def test_what_another_job_removes_is_not_published(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither once its removal has begun, nor if that begins just before the checkpoint gets its name."""
    save(tmp_path, {"epoch": 1}, step=1)
    number, path = reserve(tmp_path)
    sums = {"epoch-00000.pt": write_file(path / "epoch-00000.pt", 2)}
    manifest = Manifest(2, 1, {"epoch": "data"}, {"epoch": ["epoch-00000.pt"]}, sums)
    name, work, meanwhile = "unlink", partial(reserve, tmp_path), partial(publish, path, number, manifest)
    if first == "publication":
        name, work, meanwhile = "rename", meanwhile, work
    original, begun, problems = getattr(os, name), [], []

    def attempt(what: Callable[[], object]) -> None:
        try:
            what()
        except CheckpointError as error:
            problems.append(str(error))

    def in_between(*args: Any, **options: Any) -> None:
        if not begun:
            begun.append(True)
            attempt(meanwhile)
        original(*args, **options)

    monkeypatch.setattr(os, name, in_between)
    attempt(work)
    assert begun and len(problems) == 1 and f"another job saves in {tmp_path}" in problems[0]
    assert steps(tmp_path) == (1,)


@pytest.mark.parametrize("when", ["written", "published"])
def test_another_job_in_the_same_directory_is_named(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(archive, {"written": "write_file", "published": "publish"}[when])

    def at_the_same_time(path: Path, *args: Any, **kwargs: Any) -> Any:
        reserve(tmp_path)
        return original(path, *args, **kwargs)

    monkeypatch.setattr(archive, original.__name__, at_the_same_time)
    with pytest.raises(CheckpointError, match=f"another job saves in {tmp_path}; each training needs a directory"):
        save(tmp_path, {"epoch": 1}, step=1)


@pytest.mark.parametrize(
    ("owner", "name"), [(archive, "_write"), (archive, "write_file"), (archive, "publish"), (os, "rename")]
)
def test_a_directory_that_is_removed_is_not_another_jobs(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, folder = getattr(owner, name), tmp_path / "checkpoints"

    def after_removal(*args: Any, **kwargs: Any) -> Any:
        shutil.rmtree(folder, ignore_errors=True)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, after_removal)
    with pytest.raises(CheckpointError, match=f"{folder} was removed while a checkpoint was written to it"):
        save(folder, {"epoch": 1}, step=1)


# -- several ranks -----------------------------------------------------------------------------------------------


def load_it(path: Path, team: Team) -> None:
    load(path, {"model": model()}, process_group=team)


def read_it(path: Path, team: Team) -> None:
    read_last(path, process_group=team)


def restore_it(path: Path, team: Team) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1)
    bagua.elastic.State(net, optimizer, directory=path, process_group=team).restore()


@pytest.mark.parametrize("reads", [load_it, read_it, restore_it])
@pytest.mark.parametrize("name", ["file", "file/below", "a\0b"], ids=["file", "below", "null"])
def test_a_directory_that_cannot_be_listed_is_an_error_on_all_ranks(reads: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def rank_main(team: Team) -> str:
        with pytest.raises(CheckpointError) as caught:
            reads(tmp_path / name, team)
        save(tmp_path / "other", {"epoch": 1}, step=1, process_group=team)  # the next one is not mistaken for it
        return str(caught.value)

    for said in run_teams(2, rank_main, timeout_s=8):
        assert "rank 0 of 2: " in said and ("Not a directory" in said or "null byte" in said)


def test_a_wrong_argument_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    def rank_main(team: Team) -> tuple[str, str]:
        with pytest.raises(TypeError if team.rank else CheckpointError, match="objects: expected a dict") as loading:
            load(tmp_path, 1 if team.rank else {}, process_group=team)  # type: ignore[arg-type]
        with pytest.raises(ValueError if team.rank else CheckpointError, match="step: expected") as saving:
            save(tmp_path, {"epoch": 1}, step=-team.rank, process_group=team)
        return str(loading.value), str(saving.value)

    others, _ = run_teams(2, rank_main, timeout_s=8)
    assert all("rank 1 of 2: " in said for said in others)


def test_ranks_that_want_other_steps_are_told(tmp_path: Path) -> None:
    def rank_main(team: Team) -> list[str]:
        said: list[str] = []
        for number in (1, 3):
            save(tmp_path, {"epoch": 1}, step=number, process_group=team)
        for call in (
            lambda: save(tmp_path, {"epoch": 1}, step=3 + team.rank, process_group=team),
            lambda: load(tmp_path, {}, step=1 if team.rank else None, process_group=team),
        ):
            with pytest.raises(CheckpointError) as caught:
                call()
            said.append(str(caught.value))
        return said

    for saving, loading in run_teams(2, rank_main):
        assert saving == f"saving to {tmp_path}: step is 3 on rank 0 and 4 on rank 1"
        assert loading == f"loading from {tmp_path}: step is None on rank 0 and 1 on rank 1"
    assert steps(tmp_path) == (1, 3)


class Broken:
    """Something with a state, which cannot be had on rank 1."""

    def state_dict(self) -> dict[str, Any]:
        if torch.distributed.get_rank() == 1:
            raise OSError("no space left on device")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def on_two_ranks(path: str) -> list[str]:
    rank = torch.distributed.get_rank()
    messages = []
    save(path, {"equal": [1.5, 2], "own": rank}, step=1)
    for thing in ({"broken": Broken()}, {"own": rank, **({"more": 1} if rank else {})}):
        try:
            save(path, thing, step=2)
        except CheckpointError as error:
            messages.append(str(error))
    loaded = load(path, {})
    assert loaded is not None and loaded.step == 1 and loaded.data == {"equal": [1.5, 2], "own": rank}
    (place,) = Path(path).glob("checkpoint-*")
    if rank == 1:
        cut(place / "own-00001.pt")
    torch.distributed.barrier()
    try:
        load(path, {})
    except CheckpointError as error:
        messages.append(str(error))
    return [*messages, *sorted(path.name for path in place.iterdir())]


def test_a_problem_of_one_rank_is_everyones(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(2, on_two_ranks, str(tmp_path))
    assert first == second
    assert "rank 1 of 2: OSError: no space left on device" in first[0]
    assert "rank 1 and rank 0 differ in whether they hold more" in first[1]
    assert "rank 1 of 2" in first[2] and "own-00001.pt: has" in first[2]
    files = first[3:]
    assert [name for name in files if name.startswith("equal")] == ["equal-00000.pt"], "written once"
    assert [name for name in files if name.startswith("own")] == ["own-00000.pt", "own-00001.pt"]


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, rank=1)

    def rank_main(team: Team) -> list[str]:
        said = []
        for own in ({"full": team.rank}, {"epoch": Evil() if team.rank else 1}, {"more": 1} if team.rank else {}):
            with pytest.raises(CheckpointError) as caught:
                save(tmp_path, {"same": torch.ones(3), **own}, step=1, process_group=team)
            said.append(str(caught.value))
        packed = {"full": b"%d" % team.rank}
        with pytest.raises(CheckpointError) as caught:
            save_packed(tmp_path, packed, {"full": "data"}, {"full": [0, 1]}, step=1, keep=1, process_group=team)
        return [*said, str(caught.value)]

    for said in run_teams(2, rank_main):
        assert all("rank 1 of 2: OSError: [Errno 28]" in said[n] for n in (0, 3)) and "rank 1" in said[1]
    assert not list(tmp_path.iterdir())


def separate(path: str) -> str:
    try:
        save(f"{path}/{torch.distributed.get_rank()}", {"epoch": torch.distributed.get_rank()}, step=1)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_directory_that_is_not_shared_is_noticed(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(2, separate, str(tmp_path)):
        assert "rank 1 of 2" in said and "all ranks must see the same directory" in said


def die_while_writing(path: str) -> str:
    from bagua.checkpoint import archive

    save(path, {"epoch": 1}, step=1)
    if torch.distributed.get_rank() == 1:
        archive.sync_directory = lambda path: os._exit(1)
    try:
        save(path, {"epoch": torch.distributed.get_rank()}, step=2)
    except bagua.CommunicationError as error:
        return str(error)
    return "saved"


@pytest.mark.slow
def test_a_rank_that_dies_while_writing_is_named(pool: RankPool, tmp_path: Path) -> None:
    said, _ = pool.run(2, die_while_writing, str(tmp_path), dies=[1], group_timeout_s=3)
    assert "rank 1 did not come" in said
    assert steps(tmp_path) == (1,)


def misfit(path: str) -> str:
    save(path, {"model": model()}, step=1)
    mine = torch.nn.Linear(5, 2) if torch.distributed.get_rank() else model()
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        load(path, {"model": mine})
    return type(caught.value).__name__


def test_what_does_not_fit_on_one_rank_is_an_error_on_all(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, misfit, str(tmp_path)) == ["CheckpointError", "RuntimeError"]
