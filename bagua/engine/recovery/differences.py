"""Tensors of one rank for ranks that hold most of them already: only blocks that differ travel."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from bagua.comm.collectives import all_reduce_, broadcast_
from bagua.comm.groups import Group

__all__ = ["replicate_differences"]

_BLOCK = 16 * 1024  # bytes; small, since the rows of an embedding that a step touches lie apart
_DIGEST = 16  # bytes of SHA-256: two contents of one digest are not to be expected in any training
_CHUNK = 128  # blocks on the wire at once: ranks read the next ones, and write the last, while these travel
_SHARE = 2048  # blocks for one thread that makes digests


@torch.no_grad()
def replicate_differences(
    tensors: Sequence[Tensor],
    group: Group,
    device: torch.device,
    src: int = 0,
    most: float = 1.0,
    threads: int = 8,
) -> int | None:
    """Overwrite `tensors`, in place, with those of rank `src`, as `replicate_tensors` does. Collective.

    Ranks compare digests of blocks of 16 KiB. A block is sent to all of them if one lacks it, so it does not matter how
    a rank came by what it holds.

    Args:
        tensors: of the same shapes and dtypes on all ranks.
        device: of the group.
        src: rank of the team.
        most: share of all bytes. If more differ, nothing is sent.
        threads: at most so many make digests at once; one leaves the processors to training.

    Returns:
        bytes of the blocks that were sent, on each rank; None if too many differ.

    Raises:
        RuntimeError: a rank is lost. Tensors of the other ranks are then a mix.
    """
    if group.size == 1:
        return 0
    src = group.ranks.index(src)
    pieces = [_Piece.of(tensor) for tensor in tensors if tensor.numel()]
    if not pieces:
        return 0
    digests = _digests(pieces, threads).to(device)
    theirs = digests.clone()
    broadcast_(group, theirs, src)
    wanted = (theirs != digests).any(1).to(torch.uint8)
    all_reduce_(group, wanted, "max")
    lacking, place = wanted.bool().cpu(), 0
    for piece in pieces:
        piece.lacking, place = lacking[place : place + piece.blocks], place + piece.blocks
    if sum(piece.nbytes_lacking for piece in pieces) > most * sum(piece.flat.numel() for piece in pieces):
        return None
    sent = 0
    for chunk in _chunks(pieces):
        if group.rank == src:
            wire = torch.cat([part.to(device) for piece, where in chunk for part in piece.read(where)])
        else:
            nbytes = sum(piece.nbytes_of(where) for piece, where in chunk)
            wire = torch.empty(nbytes, dtype=torch.uint8, device=device)
        broadcast_(group, wire, src)
        sent += wire.numel()
        if group.rank != src:
            for piece, where in chunk:
                wire = piece.write(where, wire)
    if group.rank != src:
        for piece in pieces:
            piece.put_back()
    return sent


@dataclass
class _Piece:
    """A tensor as bytes.

    Attributes:
        flat: its bytes, in its memory if it is contiguous, else a copy.
        lacking: by block, whether a rank lacks it.
    """

    tensor: Tensor
    flat: Tensor
    lacking: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Piece:
        plain = tensor.detach()
        return cls(plain, plain.contiguous().view(-1).view(torch.uint8), torch.empty(0, dtype=torch.bool, device="cpu"))

    @property
    def blocks(self) -> int:
        """The last one may be shorter."""
        return -(-self.flat.numel() // _BLOCK)

    @property
    def nbytes_lacking(self) -> int:
        """Of the blocks that a rank lacks."""
        return min(int(self.lacking.sum()) * _BLOCK, self.flat.numel())

    def nbytes_of(self, where: Tensor) -> int:
        """How many bytes these blocks have."""
        (rows, _), tail = self._split(where)
        return rows.numel() * _BLOCK + tail

    def read(self, where: Tensor) -> list[Tensor]:
        """The bytes of these blocks."""
        full, tail = self._split(where)
        return [full[1][full[0]].view(-1), *([self.flat[-tail:]] if tail else [])]

    def write(self, where: Tensor, wire: Tensor) -> Tensor:
        """Overwrite these blocks from the beginning of `wire`; returns the rest of it."""
        (rows, matrix), tail = self._split(where)
        nbytes = rows.numel() * _BLOCK
        if nbytes:
            matrix[rows] = wire[:nbytes].view(-1, _BLOCK).to(matrix.device)
        if tail:
            self.flat[-tail:] = wire[nbytes : nbytes + tail].to(self.flat.device)
        return wire[nbytes + tail :]

    def put_back(self) -> None:
        """Into the tensor, if it is not contiguous."""
        if self.flat.data_ptr() != self.tensor.data_ptr() and bool(self.lacking.any()):
            self.tensor.copy_(self.flat.view(self.tensor.dtype).view(self.tensor.shape))

    def _split(self, where: Tensor) -> tuple[tuple[Tensor, Tensor], int]:
        """Full blocks among `where`, and all of them as a matrix; bytes of the short one, if it is among `where`."""
        number = self.flat.numel() // _BLOCK
        full = where[where < number].to(self.flat.device)
        tail = self.flat.numel() % _BLOCK if full.numel() < where.numel() else 0
        return (full, self.flat[: number * _BLOCK].view(number, _BLOCK)), tail


def _chunks(pieces: Sequence[_Piece]) -> Iterator[list[tuple[_Piece, Tensor]]]:
    """Blocks that are lacking, at most `_CHUNK` at once."""
    chunk: list[tuple[_Piece, Tensor]] = []
    room = _CHUNK
    for piece in pieces:
        left = piece.lacking.nonzero().view(-1)
        while left.numel():
            now, left = left[:room], left[room:]
            chunk.append((piece, now))
            room -= now.numel()
            if not room:
                yield chunk
                chunk, room = [], _CHUNK
    if chunk:
        yield chunk


def _digests(pieces: Sequence[_Piece], most_threads: int) -> Tensor:
    """Of all blocks, [B, 16] uint8 on the CPU."""
    contents = [piece.flat.cpu().numpy().data for piece in pieces]
    blocks = [each[at : at + _BLOCK] for each in contents for at in range(0, len(each), _BLOCK)]

    def digest(some: Sequence[memoryview]) -> bytes:
        return b"".join(hashlib.sha256(block).digest()[:_DIGEST] for block in some)

    # SHA-256 releases the interpreter lock.
    threads = min(most_threads, os.cpu_count() or 1, 1 + len(blocks) // _SHARE)
    share = -(-len(blocks) // threads)
    shares = [blocks[at : at + share] for at in range(0, len(blocks), share)]
    if len(shares) < 2:
        found = b"".join(map(digest, shares))
    else:
        with ThreadPoolExecutor(threads, "bagua-digests") as pool:
            found = b"".join(pool.map(digest, shares))
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).view(-1, _DIGEST)
