"""Save training state in a directory, and load it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bagua.checkpoint.agree import agree, agree_on, share, team_of
from bagua.checkpoint.directory import (
    Manifest,
    check_not_removed,
    discard_old,
    find,
    naming_one_before,
    publish,
    read_file,
    read_manifest,
    removed_on_failure,
    reserve,
    sync_directory,
    write_bytes,
    write_file,
)
from bagua.checkpoint.errors import CheckpointError
from bagua.checkpoint.items import Item, check_objects, collect
from bagua.checkpoint.restore import Found, restore, wanted
from bagua.checkpoint.tolerant import (
    LOAD_BEFORE,
    check_nobody_is_left_out,
    refuse_fault_tolerant,
    with_those_left,
)
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team

__all__ = ["Loaded", "load", "read_last", "save", "save_items", "save_packed", "steps"]


@dataclass(frozen=True)
class Loaded:
    """Result of loading a checkpoint.

    Attributes:
        step: what was given to `save`.
        size: number of ranks that saved it.
        path: its directory.
        data: plain data by name, for instance an epoch.
    """

    step: int
    size: int
    path: Path
    data: dict[str, Any] = field(default_factory=dict)


def steps(directory: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the steps of the complete checkpoints in `directory`, the one saved last at the end.

    Examples:
        >>> for step in (100, 200):
        ...     directory = bagua.checkpoint.save(path, {"model": model}, step=step)
        >>> bagua.checkpoint.steps(path)
        (100, 200)
    """
    return tuple(place.step for place in find(Path(directory)))


def save(
    directory: str | os.PathLike[str],
    objects: Mapping[str, Any],
    *,
    step: int,
    keep: int | None = 2,
    process_group: Any = None,
) -> Path:
    """Write a checkpoint atomically. Collective: call it on all ranks, between steps.

    If a process is killed, earlier checkpoints stay intact. Items that are equal on all ranks are written once. torch's
    random state is saved too. Of a module distributed with `fault_tolerant` the ranks that are left make one
    checkpoint, without random state (docs/fault_tolerance.md).

    Args:
        directory: of this training alone; seen by all ranks; made if it is not there.
        objects: by name: modules (of a distributed one the algorithm's state is saved too), optimizers, anything
            with `state_dict` and `load_state_dict`, and plain data. Iterate a sampler of Bagua with its `track`, or
            what workers of a DataLoader have fetched counts as used.
        step: training steps made so far; the same on all ranks.
        keep: remove all but the last so many checkpoints once this one is complete; None keeps all.
        process_group: a `ProcessGroup` or one-dimensional `DeviceMesh`; None for all ranks.

    Returns:
        The directory of this checkpoint.

    Raises:
        ValueError, TypeError: an argument is wrong.
        CheckpointError: a rank could not write its part, or got a wrong argument; names the rank. Nothing has changed.
        CommunicationError: a rank did not arrive within the timeout.

    Examples:
        >>> objects = {"model": model, "optimizer": optimizer, "epoch": 3}
        >>> directory = bagua.checkpoint.save(path, objects, step=100)
    """

    def check() -> None:
        check_objects(objects)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
            raise ValueError(f"step: expected an integer >= 0, got {step!r}")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep: expected an integer >= 1 or None, got {keep!r}")

    what = f"saving to {os.fspath(directory)}"

    def with_survivors(team: Team, moved: int) -> Path:
        agree_on(team, what, check)
        made = max(agree(team, what, step + moved, None))  # a rank that has moved is where the others are now
        return save_items(
            directory, lambda: collect(objects, rng=False), step=made, keep=keep, process_group=team, first_counts=True
        )

    def without_this_rank() -> Path:
        places = find(Path(directory))
        if not places:
            raise CheckpointError(f"{what}: the other ranks have saved without this one, and nothing is there")
        return places[-1].path

    if process_group is None and isinstance(objects, Mapping):
        tolerantly = with_those_left(objects, what, with_survivors, without_this_rank)
        if tolerantly is not None:
            return tolerantly()
        check_nobody_is_left_out(process_group, what)
    refuse_fault_tolerant(objects, what, "leave process_group out: the ranks that are left save")
    team = team_of(process_group)
    agree_on(team, what, check, {"step": repr(step)})
    return save_items(directory, lambda: collect(objects), step=step, keep=keep, process_group=team)


def save_items(
    directory: str | os.PathLike[str],
    make: Callable[[], dict[str, Item]],
    *,
    step: int,
    keep: int | None,
    process_group: Any = None,
    only_if_different: Collection[str] = (),
    first_counts: bool = False,
) -> Path:
    """`save` of the items that `make` returns. Collective.

    Args:
        directory, step, keep, process_group: as in `save`.
        make: its errors are raised on all ranks.
        only_if_different: names of items that are left out if all ranks hold the same.
        first_counts: of plain data and objects other than modules and optimizers take those of rank 0.

    Raises:
        CheckpointError, CommunicationError: as `save`.
    """
    team, folder, what = team_of(process_group), Path(directory), f"saving step {step} to {os.fspath(directory)}"
    items: dict[str, Item] = {}
    problem: BaseException | None = None
    number, path = 0, None
    try:
        items = make()
        if team.rank == 0:
            number, path = reserve(folder)
    except Exception as error:  # the other ranks must hear of it
        problem = error
    with removed_on_failure(path):
        owners = share(team, what, items, problem)
        owners = {name: ranks for name, ranks in owners.items() if name not in only_if_different or any(ranks)}
        if first_counts:
            of_one = {name for name in owners if items[name].kind in ("data", "stateful")}
            owners = {name: [0] * team.size if name in of_one else ranks for name, ranks in owners.items()}
        number, name = decode(team.broadcast_bytes(what, None if path is None else encode([number, path.name])))
        writers = {name: partial(write_file, value=items[name].value) for name in owners}
        content = _Content(writers, {name: items[name].kind for name in owners}, owners)
        return _complete(folder, (number, name), content, step, keep, team, what)


def save_packed(
    directory: str | os.PathLike[str],
    packed: Mapping[str, bytes],
    kinds: Mapping[str, str],
    owners: dict[str, list[int]],
    *,
    step: int,
    keep: int | None,
    process_group: Any = None,
) -> Path:
    """`save` of items that are bytes already, as `torch.save` makes them. May run in a thread. Collective.

    Args:
        directory, step, keep, process_group: as in `save`.
        packed: this rank's items.
        kinds: of the items, equal on all ranks.
        owners: for each item, by rank, the rank whose bytes stand for that rank; equal on all ranks.

    Raises:
        CheckpointError, CommunicationError: as `save`.
    """
    team, folder, what = team_of(process_group), Path(directory), f"saving step {step} to {os.fspath(directory)}"
    number, path, problem = 0, None, None
    if team.rank == 0:
        try:
            number, path = reserve(folder)
        except Exception as error:  # the other ranks must hear of it
            problem = error
    with removed_on_failure(path):
        number, name = agree(team, what, [number, "" if path is None else path.name], problem)[0]
        writers = {name: partial(write_bytes, data=data) for name, data in packed.items()}
        return _complete(folder, (number, name), _Content(writers, dict(kinds), owners), step, keep, team, what)


@dataclass(frozen=True)
class _Content:
    """The items of a checkpoint, by name.

    Attributes:
        writers: write an item to a file of this rank, and return its size and checksum.
        kinds: equal on all ranks.
        owners: by rank, the rank whose bytes stand for that rank.
    """

    writers: Mapping[str, Callable[[Path], tuple[int, int]]]
    kinds: dict[str, str]
    owners: dict[str, list[int]]


def _complete(
    folder: Path,
    place: tuple[int, str],
    content: _Content,
    step: int,
    keep: int | None,
    team: Team,
    what: str,
) -> Path:
    """Write the files of a reserved checkpoint and publish it. `place`: its number, and the name it has until then."""
    number, path = place[0], folder / place[1]
    sums, problem = _write(path, content, team)
    reports = agree(team, what, sums, problem)
    files = {name: [_file(name, rank) for rank in by_rank] for name, by_rank in content.owners.items()}
    manifest = Manifest(step, team.size, content.kinds, files)
    for report in reports:
        manifest.sums |= {name: (nbytes, crc) for name, (nbytes, crc) in report.items()}
    final, problem = path, None
    if team.rank == 0:
        try:
            final = publish(path, number, manifest)
            if keep is not None:
                discard_old(folder, keep)
        except Exception as error:  # the other ranks must hear of it
            problem = error
    agree(team, what, None, problem)
    return folder / f"checkpoint-{number:06d}-step-{step}" if team.rank else final


def _write(path: Path, content: _Content, team: Team) -> tuple[dict[str, tuple[int, int]], BaseException | None]:
    """Write what this rank owns; returns sizes and checksums, or the trouble."""
    sums: dict[str, tuple[int, int]] = {}
    try:
        if team.rank == 0:
            check_not_removed(path)
        if not path.is_dir():
            raise CheckpointError(f"{path} does not exist; all ranks must see the same directory")
        for name, write in content.writers.items():
            if content.owners[name][team.rank] == team.rank:
                file = _file(name, team.rank)
                sums[file] = write(path / file)
        sync_directory(path)
    except CheckpointError as error:
        return {}, error
    except Exception as error:
        try:
            check_not_removed(path)
        except CheckpointError as removed:
            return {}, removed
        return {}, error
    return sums, None


def _file(item: str, rank: int) -> str:
    return f"{item}-{rank:05d}.pt"


def load(
    directory: str | os.PathLike[str],
    objects: Mapping[str, Any],
    *,
    step: int | None = None,
    rng: bool = True,
    process_group: Any = None,
) -> Loaded | None:
    """Load the last complete checkpoint into `objects`. Collective, like `save`; call it after `bagua.distribute`.

    With `fault_tolerant` call it before, where each rank loads by itself.

    With the same number of ranks, training continues with the same bits as without a stop. Another number of ranks
    works where the algorithm's state can be converted; see docs/checkpointing.md.

    Args:
        directory: as in `save`.
        objects: as in `save`, or some of them; what is plain data there is ignored here and returned.
        step: step to load, the same on all ranks; default the last. Of several with that step, the one saved last.
        rng: restore torch's random state too, if the number of ranks is the same.
        process_group: as in `save`.

    Returns:
        What was loaded; None if there is no checkpoint and `step` is None.

    Raises:
        ValueError, TypeError: an argument is wrong.
        CheckpointError: `directory` cannot be read, files are damaged, an object is not in them, or something does not
            fit; names it. So does a wrong argument of another rank. It is a ValueError too if a module runs another
            algorithm than it was saved with.
        CommunicationError: a rank did not arrive within the timeout.

    Examples:
        >>> objects = {"model": model, "optimizer": optimizer, "epoch": 3}
        >>> bagua.checkpoint.load(path, objects) is None  # nothing there: train from the start
        True
        >>> directory = bagua.checkpoint.save(path, objects, step=100)
        >>> loaded = bagua.checkpoint.load(path, objects)
        >>> loaded.step, loaded.data["epoch"]
        (100, 3)
    """
    folder, what = Path(directory), f"loading from {os.fspath(directory)}"
    refuse_fault_tolerant(objects, what, LOAD_BEFORE)
    team = team_of(process_group)
    agree_on(team, what, lambda: check_objects(objects), {"step": repr(step)})
    read = _agree_on(folder, step, lambda kinds, where: wanted(kinds, objects, where), team, what)
    if read is None:
        return None
    path, manifest, found = read
    data = restore(found, objects, team, rng=rng)
    return Loaded(manifest.step, manifest.size, path, data)


def _choose(folder: Path, step: int | None) -> str | None:
    places = find(folder)
    match = [place for place in places if step is None or place.step == step]
    if match:
        return match[-1].path.name
    if step is None:
        return None
    have = ", ".join(str(place.step) for place in places) or "no checkpoint"
    raise CheckpointError(f"{folder} has no checkpoint of step {step}; it has {have}")


def read_last(
    directory: str | os.PathLike[str], *, process_group: Any = None, all_copies: bool = False
) -> Found | None:
    """Read all items of the last complete checkpoint; None if there is none. Collective.

    Args:
        directory, process_group: as in `load`.
        all_copies: those of all ranks, also if their number is the same.

    Raises:
        CheckpointError: `directory` cannot be read, or files are damaged.
        CommunicationError: a rank did not arrive within the timeout.
    """
    team, what = team_of(process_group), f"loading from {os.fspath(directory)}"
    read = _agree_on(Path(directory), None, lambda kinds, _: list(kinds), team, what, all_copies)
    return None if read is None else read[2]


def _agree_on(
    folder: Path,
    step: int | None,
    names: Callable[[Mapping[str, str], str], list[str]],
    team: Team,
    what: str,
    all_copies: bool = False,
) -> tuple[Path, Manifest, Found] | None:
    """Choose a checkpoint on rank 0, and read on every rank what it needs, without changing anything. Collective."""
    name: str | None = None
    problem: Exception | None = None
    try:
        if team.rank == 0:
            name = _choose(folder, step)
    except Exception as error:  # the other ranks must hear of it
        problem = error
    (chosen, *_) = agree(team, what, name, problem)
    if chosen is None:
        return None
    path, found = folder / chosen, None
    manifest = Manifest(0, 0)
    try:
        with naming_one_before(path):
            manifest = read_manifest(path)
        items = names(manifest.kinds, str(path))
        with naming_one_before(path):
            found = _read(path, manifest, items, team, all_copies)
    except Exception as error:  # the other ranks must hear of it
        problem = error
    agree(team, what, None, problem)
    assert found is not None
    return path, manifest, found


def _read(path: Path, manifest: Manifest, items: Iterable[str], team: Team, all_copies: bool) -> Found:
    """Read this rank's copies of `items`; if the number of ranks has changed, all ranks'."""
    same_size = manifest.size == team.size
    parts: dict[str, list[Any]] = {}
    for name in items:
        names = manifest.files[name]
        if same_size and not all_copies:
            names = [names[team.rank]]
        elif not same_size and manifest.kinds[name] == "rng":
            continue
        cache = {file: read_file(path / file, manifest.sums[file]) for file in dict.fromkeys(names)}
        parts[name] = [cache[file] for file in names]
    return Found(str(path), manifest.size, {name: manifest.kinds[name] for name in parts}, parts)
