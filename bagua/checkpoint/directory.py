"""The directory of checkpoints: its layout, and how a checkpoint is written atomically.

    directory/
      checkpoint-000006-step-100/
      checkpoint-000007-step-120/       the newest: the one with the highest number, whatever its step
        model-00000.pt ...              one file for each item and each rank that holds another copy than rank 0
        checkpoint.json                 what there is: sizes, checksums, which file stands for which rank

A checkpoint is written into `writing-<number>-<token>/` and renamed when all of it is on the disk.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bagua.checkpoint.errors import CheckpointError

__all__ = [
    "Manifest",
    "Place",
    "check_not_removed",
    "discard_old",
    "find",
    "naming_one_before",
    "publish",
    "read_file",
    "read_manifest",
    "remove_leftovers",
    "removed_on_failure",
    "reserve",
    "write_bytes",
    "write_file",
]

_COMPLETE = re.compile(r"checkpoint-(\d{6,18})-step-(\d{1,18})")
_LEFTOVER = re.compile(r"(writing|removing)-(\d{6,18})-[0-9a-f]{8}")
_FILE = re.compile(r"[A-Za-z_.][\w.]{0,120}-\d{5,9}\.pt")
_MANIFEST = "checkpoint.json"
_MANIFEST_BYTES = 64 * 2**20  # at most
_VERSION = 1


@dataclass(frozen=True)
class Place:
    """A complete checkpoint."""

    number: int
    step: int
    path: Path


@dataclass
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: training steps made.
        size: number of ranks that saved it.
        kinds: of the items.
        files: for each item, by rank, the file that stands for the rank.
        sums: size in bytes and CRC-32 of each file.
    """

    step: int
    size: int
    kinds: dict[str, str] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    sums: dict[str, tuple[int, int]] = field(default_factory=dict)


def find(directory: Path) -> list[Place]:
    """All complete checkpoints, the oldest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = [(match, directory / match[0]) for name in names if (match := _COMPLETE.fullmatch(name))]
    places = [Place(int(match[1]), int(match[2]), path) for match, path in found]
    return sorted(places, key=lambda place: (place.number, place.step))


def reserve(directory: Path) -> tuple[int, Path]:
    """Remove what an interrupted save has left, and make the directory of the next one; returns number and path."""
    directory.mkdir(parents=True, exist_ok=True)
    numbers = [*(place.number for place in find(directory)), *remove_leftovers(directory)]
    number = max(numbers, default=0) + 1
    path = directory / f"writing-{number:06d}-{secrets.token_hex(4)}"
    path.mkdir()
    return number, path


def remove_leftovers(directory: Path) -> list[int]:
    """Remove what interrupted saves have left; returns the numbers of these checkpoints."""
    numbers: list[int] = []
    for name in os.listdir(directory):
        if match := _LEFTOVER.fullmatch(name):
            numbers.append(int(match[2]))
            with suppress(OSError):  # its writer has published it, or another job removes it
                _remove(directory / name, int(match[2]))
    return numbers


@contextmanager
def removed_on_failure(path: Path | None) -> Iterator[None]:
    """Remove the reserved directory `path`, if any, when the ranks have agreed that they failed: nobody writes then.

    If a rank did not come to the agreement it may still be writing; then the next `reserve` removes what is left.
    """
    try:
        yield
    except CheckpointError:
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
        raise


class _Writer:
    """A file that knows size and checksum of what was written to it.

    Attributes:
        problem: the first error of the file. `torch.save` raises another one in its place.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self.nbytes = self.crc = 0
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        count = memoryview(data).nbytes
        self.nbytes += count
        with self._noting():
            self.file.write(data)
        return count

    def flush(self) -> None:
        with self._noting():
            self.file.flush()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or error
            raise


@contextmanager
def _on_disk(path: Path) -> Iterator[Any]:
    """A new file that is on the disk at the end; an `OSError` names it."""
    try:
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


def write_file(path: Path, value: Any) -> tuple[int, int]:
    """Write `value` so that it is on the disk when this returns; returns size and checksum.

    Raises:
        CheckpointError: `value` holds an object that is not plain data.
        OSError: the disk is full, say.
    """
    with _on_disk(path) as file:
        writer = _Writer(file)
        try:
            torch.save(value, writer)  # pyright: ignore[reportArgumentType]
        except Exception:
            if writer.problem is None:
                raise
        if writer.problem is not None:
            raise writer.problem
    try:  # now, not when it is needed: what was pickled must come back without unpickling arbitrary classes
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path.name}: holds something that is neither a tensor nor plain data ({str(error).splitlines()[0]})"
        ) from error
    return writer.nbytes, writer.crc


def write_bytes(path: Path, data: bytes) -> tuple[int, int]:
    """`write_file` of what `torch.save` has made bytes of already.

    Raises:
        OSError: the disk is full, say.
    """
    with _on_disk(path) as file:
        file.write(data)
    return len(data), zlib.crc32(data)


def check_not_removed(path: Path) -> None:
    """Of what is being written.

    Raises:
        CheckpointError: a save of another job has removed it, or the directory that it is in was removed.
    """
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} was removed while a checkpoint was written to it")
    if not path.exists():
        raise CheckpointError(
            f"{path} was removed while it was written: another job saves in {path.parent}; each training needs a "
            "directory of its own"
        )


def publish(path: Path, number: int, manifest: Manifest) -> Path:
    """Give the complete directory `path` its name, after which it counts.

    Raises:
        CheckpointError: a file of another rank is not there, or not whole: ranks do not share the directory. Or
            `path` has been removed.
    """
    check_not_removed(path)
    for name, (nbytes, _) in manifest.sums.items():
        have = (path / name).stat().st_size if (path / name).exists() else None
        if have != nbytes:
            raise CheckpointError(
                f"{path / name}: {'is missing' if have is None else f'has {have} bytes'}, but {nbytes} were written; "
                "all ranks must see the same directory"
            )
    text = json.dumps({"version": _VERSION, "torch": torch.__version__, **vars(manifest)}, indent=1)
    final = path.parent / f"checkpoint-{number:06d}-step-{manifest.step}"
    try:
        with _on_disk(path / _MANIFEST) as file:
            file.write(text.encode())
        sync_directory(path)
        os.rename(path, final)
    except FileNotFoundError:
        check_not_removed(path)
        raise
    sync_directory(path.parent)
    return final


def sync_directory(path: Path) -> None:
    """Bring the directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard_old(directory: Path, keep: int) -> None:
    """Remove all complete checkpoints but the last `keep`. What is being removed no longer counts."""
    for place in find(directory)[:-keep]:
        _remove(place.path, place.number)


def _remove(path: Path, number: int) -> None:
    """Remove checkpoint `number`, complete or not, which is now at `path`.

    Renamed first: a removal in place would go on in a directory that its writer publishes meanwhile.
    """
    away = path.with_name(f"removing-{number:06d}-{secrets.token_hex(4)}")
    os.rename(path, away)
    shutil.rmtree(away, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """Read what the checkpoint `path` holds.

    Raises:
        CheckpointError: it is damaged, or of another version.
    """
    file = path / _MANIFEST
    try:
        if file.stat().st_size > _MANIFEST_BYTES:
            raise ValueError("too long")
        data = json.loads(file.read_bytes())
        if data["version"] != _VERSION:
            raise CheckpointError(f"{file}: version {data['version']!r}, expected {_VERSION}")
        manifest = Manifest(
            int(data["step"]),
            int(data["size"]),
            {str(name): str(kind) for name, kind in data["kinds"].items()},
            {str(item): [str(name) for name in names] for item, names in data["files"].items()},
            {str(name): (int(nbytes), int(crc)) for name, (nbytes, crc) in data["sums"].items()},
        )
        named = {name for names in manifest.files.values() for name in names}
        if manifest.kinds.keys() != manifest.files.keys() or not named <= manifest.sums.keys():
            raise ValueError("items without files")
        if manifest.size < 1:
            raise ValueError(f"saved by {manifest.size} ranks")
        if any(len(names) != manifest.size for names in manifest.files.values()):
            raise ValueError("items of other ranks")
        if not all(_FILE.fullmatch(name) for name in manifest.sums):
            raise ValueError("a file name out of place")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file}: damaged ({type(error).__name__}: {error})") from error
    return manifest


@contextmanager
def naming_one_before(path: Path) -> Iterator[None]:
    """While checkpoint `path` is read: an error names the newest checkpoint before it that seems to be whole.

    By its sizes: to read all of it takes too long while other ranks wait.
    """
    try:
        yield
    except CheckpointError as error:
        before = next((place for place in reversed(_before(path)) if _seems_whole(place.path)), None)
        if before is None:
            raise
        by_step = f"load with step={before.step}, or " if f"-step-{before.step}" not in path.name else ""
        raise CheckpointError(
            f"{error}; {before.path.name}, saved before it, has all its files: {by_step}move {path.name} away"
        ) from error


def _before(path: Path) -> list[Place]:
    """The complete checkpoints that were saved before `path`, the oldest first."""
    try:
        places = find(path.parent)
    except OSError:
        return []
    names = [place.path.name for place in places]
    return places[: names.index(path.name)] if path.name in names else places


def _seems_whole(path: Path) -> bool:
    try:
        sums = read_manifest(path).sums
        return all((path / name).stat().st_size == nbytes for name, (nbytes, _) in sums.items())
    except (OSError, CheckpointError):
        return False


def read_file(path: Path, sums: tuple[int, int]) -> Any:
    """Read what `write_file` wrote.

    Raises:
        CheckpointError: size or checksum is not as it was.
    """
    nbytes, crc = sums
    try:
        have = path.stat().st_size
        if have != nbytes:
            raise CheckpointError(f"{path}: has {have} bytes, but {nbytes} were written")
        seen = 0
        with open(path, "rb") as file:
            while chunk := file.read(1 << 22):
                seen = zlib.crc32(chunk, seen)
        if seen != crc:
            raise CheckpointError(f"{path}: damaged: its checksum differs from the one recorded when it was written")
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
