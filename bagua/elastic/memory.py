"""Memory for commits that outlives the ranks: created by the launcher, used by the ranks of its node.

It is anonymous (`memfd_create`): it has no name on the machine and is gone when the launcher is, however that ends.
A rank finds it under /proc, which opens it only for the launcher's own user. Imports nothing of torch.

A slot is one file: header, JSON that says what it holds, and the parts one after another. The header says "valid" last,
so that a rank which is killed while it writes leaves a slot that holds nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["VARIABLE", "Memory", "Slot", "open_slots"]

VARIABLE = "BAGUA_ELASTIC_MEMORY"
_NAME = "bagua-elastic"
_SLOTS = 2  # of each rank: the newest commit, and the one that is being written
_MAX_RANKS = 1024
_MAGIC = b"BAGUAEL1"
_HEADER = struct.Struct("<8s16sQQQQ")  # magic, token, valid, bytes of the JSON, its CRC-32, bytes of all
_CHUNK = 1 << 26


class Memory:
    """The launcher's side: slots for the ranks of this node.

    Args:
        num_ranks: on this node.

    Raises:
        OSError: the system has no `memfd_create`, or too few file descriptors are allowed.
        ValueError: `num_ranks` is out of range.
    """

    def __init__(self, num_ranks: int) -> None:
        if not 1 <= num_ranks <= _MAX_RANKS:
            raise ValueError(f"num_ranks: expected 1 to {_MAX_RANKS}, got {num_ranks}")
        self._token = secrets.token_bytes(16)
        self._files: list[int] = []
        try:
            for _ in range(num_ranks * _SLOTS):
                file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
                self._files.append(file)
                os.pwrite(file, _HEADER.pack(_MAGIC, self._token, 0, 0, 0, 0), 0)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """What ranks need to find the slots, as the value of `VARIABLE`."""
        return f"{os.getpid()}:{self._token.hex()}:{','.join(map(str, self._files))}"

    def close(self) -> None:
        """Give the memory back, once no rank has it open any more."""
        for file in self._files:
            os.close(file)
        self._files.clear()


def open_slots(address: str) -> list[tuple[Slot, ...]]:
    """The slots of each rank of this node.

    Raises:
        ValueError: `address` is malformed, or the launcher that it names is gone.
    """
    try:
        pid, token, files = address.split(":")
        paths = [f"/proc/{int(pid)}/fd/{int(file)}" for file in files.split(",")]
        slots = [Slot(path, bytes.fromhex(token)) for path in paths]
    except (ValueError, OSError) as error:
        raise ValueError(f"{VARIABLE}={address!r}: the launcher's memory cannot be opened ({error})") from error
    if len(slots) % _SLOTS:
        raise ValueError(f"{VARIABLE}={address!r}: an odd number of slots")
    return [tuple(slots[at : at + _SLOTS]) for at in range(0, len(slots), _SLOTS)]


class Slot:
    """One place for a commit.

    Args:
        path: of the launcher's file descriptor.
        token: that the launcher put there; another file that happens to be at `path` is refused.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is none of the launcher's.
    """

    def __init__(self, path: str, token: bytes) -> None:
        self._token = token
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if not os.readlink(path).startswith(f"/memfd:{_NAME}") or self._header() is None:
            os.close(self._file)
            raise ValueError(f"{path} is not memory of this job")

    def write(self, about: Mapping[str, Any], parts: Sequence[tuple[Mapping[str, Any], bytes]]) -> None:
        """Replace what is here.

        Args:
            about: plain data.
            parts: each with plain data about it.

        Raises:
            OSError: out of memory; the slot is empty then.
        """
        table = [{**facts, "nbytes": len(data), "crc": zlib.crc32(data)} for facts, data in parts]
        text = json.dumps({**about, "parts": table}).encode()
        total = _HEADER.size + len(text) + sum(len(data) for _, data in parts)
        os.pwrite(self._file, _HEADER.pack(_MAGIC, self._token, 0, 0, 0, 0), 0)
        os.ftruncate(self._file, total)
        at = self._put(text, _HEADER.size)
        for _, data in parts:
            at = self._put(data, at)
        os.pwrite(self._file, _HEADER.pack(_MAGIC, self._token, 1, len(text), zlib.crc32(text), total), 0)

    def about(self) -> dict[str, Any] | None:
        """What is said of the commit here, with its `parts`; None if there is none, or none that is whole."""
        header = self._header()
        if header is None or header[2] != 1:
            return None
        _, _, _, num_text, crc, total = header
        if not 0 < num_text <= total - _HEADER.size or os.fstat(self._file).st_size != total:
            return None
        text = self._get(_HEADER.size, num_text)
        if zlib.crc32(text) != crc:
            return None
        found = json.loads(text)
        return found if sum(part["nbytes"] for part in found["parts"]) == total - _HEADER.size - num_text else None

    def part(self, index: int) -> bytes:
        """The bytes of part `index` of `about`.

        Raises:
            ValueError: there is no such part, or it is damaged.
        """
        header, about = self._header(), self.about()
        if header is None or about is None or not 0 <= index < len(about["parts"]):
            raise ValueError(f"memory: no part {index}")
        begin = _HEADER.size + header[3] + sum(part["nbytes"] for part in about["parts"][:index])
        data = self._get(begin, about["parts"][index]["nbytes"])
        if zlib.crc32(data) != about["parts"][index]["crc"]:
            raise ValueError(f"memory: part {index} is damaged")
        return data

    def close(self) -> None:
        """Let go of the memory; the launcher keeps it."""
        os.close(self._file)

    def _header(self) -> tuple[Any, ...] | None:
        data = os.pread(self._file, _HEADER.size, 0)
        if len(data) != _HEADER.size:
            return None
        header = _HEADER.unpack(data)
        return header if header[0] == _MAGIC and header[1] == self._token else None

    def _put(self, data: bytes, at: int) -> int:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view[:_CHUNK], at)
            view, at = view[written:], at + written
        return at

    def _get(self, at: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            count = os.preadv(self._file, [view[:_CHUNK]], at)
            if not count:
                raise ValueError("memory: cut short")
            view, at = view[count:], at + count
        return bytes(data)
