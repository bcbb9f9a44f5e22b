"""Finds which parameters any rank used, without a collective: only ranks that miss gradients query the store.

A rank whose set of used parameters changed writes it to the store before it launches its last exchange of the
pass. A rank that misses parameters reads all sets after its exchanges of the pass are done. Since an exchange
cannot finish before every rank has launched it, what is read is complete. A rank may be some passes ahead of one
that still reads, but not past the next exchange; so changes are kept back to the last pass with an exchange, and the
newest one that is not from the reader's future counts.
"""

from __future__ import annotations

from typing import Any

__all__ = ["UsageBoard", "bitmap"]

_ASCII = b"01" + bytes(254)


class UsageBoard:
    """One board per distributed module. Sets are bitmaps with a bit for each parameter.

    Args:
        store: shared by the team, with calls that end; keys are made under `prefix`.
        prefix: new for each module, equal on all ranks.
        num_params: number of trainable parameters.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int, num_params: int) -> None:
        self._store = store
        self._keys = [f"{prefix}/{other}" for other in range(size)]
        self._rank = rank
        self._width = -(-num_params // 8)
        full = (1 << num_params) - 1
        self._changes: list[tuple[int, int]] = [(-1, full)]  # (pass from which on, bitmap), newest last
        if size > 1:
            self._write()

    @property
    def keys(self) -> list[str]:
        """This rank's in the store."""
        return [self._keys[self._rank]] if len(self._keys) > 1 else []

    def publish(self, pass_index: int, used: int, last_exchanged: int) -> None:
        """Publish the set of parameters that this rank uses from this pass on; free if unchanged.

        Args:
            last_exchanged: the last earlier pass with an exchange; no rank still reads entries of passes before it.
        """
        if used == self._changes[-1][1] or len(self._keys) == 1:
            return
        while len(self._changes) > 1 and self._changes[1][0] <= last_exchanged:
            del self._changes[0]
        self._changes.append((pass_index, used))
        self._write()

    def union(self, pass_index: int, used: int) -> int:
        """Return what any rank uses in this pass. This rank's own `used` is given, the others' are read."""
        for rank, text in enumerate(self._store.multi_get(self._keys) if len(self._keys) > 1 else ()):
            if rank != self._rank:
                used |= self._at(bytes(text), pass_index)
        return used

    def _write(self) -> None:
        entries = b"".join(
            (since + 1).to_bytes(8, "big") + used.to_bytes(self._width, "big") for since, used in self._changes
        )
        self._store.set(self._keys[self._rank], entries)

    def _at(self, entries: bytes, pass_index: int) -> int:
        width = 8 + self._width
        if not entries or len(entries) % width:
            raise ValueError(f"usage entry of {len(entries)} bytes, expected a multiple of {width}")
        found = 0
        for start in range(0, len(entries), width):
            since = int.from_bytes(entries[start : start + 8], "big") - 1
            if since <= pass_index:
                found = int.from_bytes(entries[start + 8 : start + width], "big")
        return found


def bitmap(flags: bytearray) -> int:
    """The set of parameters whose flag is 1: flag i as bit i.

    Example:
        >>> bin(bitmap(bytearray([1, 0, 1])))
        '0b101'
    """
    return int(bytes(flags[::-1]).translate(_ASCII), 2)
