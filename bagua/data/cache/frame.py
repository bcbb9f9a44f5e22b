"""The format of an entry in a store: a header with a checksum, and the payload."""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from bagua.data.cache.store import Buffer
from bagua.data.cache.values import read_payload, write_payload

__all__ = ["KEY_BYTES", "SERIALIZERS", "make_frame", "make_key", "read_frame", "seal_frame"]

KEY_BYTES = 16
SERIALIZERS = {"plain": 0, "pickle": 1}
# Magic, serializer, kind of checksum, checksum of all else, bytes of the payload, key.
_HEAD = struct.Struct(f"<4sBB2xQQ{KEY_BYTES}s24x")
_MAGIC = b"BgC1"
_KIND_AT, _CHECKSUM_AT = 5, 8
_CRC32, _XXH3 = 0, 1

try:
    # More than ten times as fast as CRC-32, which for samples of a megabyte is most of the time of a hit.
    from xxhash import xxh3_64
except ImportError:
    xxh3_64 = None


def make_key(dataset_name: str, key: str | int | bytes) -> bytes:
    """Return 16 bytes for a sample's key; 1 and "1" differ, and so do ("a", "b_c") and ("a_b", "c").

    Raises:
        TypeError: `key` is neither str, int nor bytes.
    """
    if isinstance(key, str):
        text = b"s" + key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes):
        text = b"b" + key
    elif isinstance(key, int):
        text = b"i%d" % key
    else:
        raise TypeError(f"key: expected str, int or bytes, got {type(key).__name__}")
    name = dataset_name.encode("utf-8", "surrogatepass")
    return blake2b(b"%d:" % len(name) + name + text, digest_size=KEY_BYTES).digest()


def make_frame(
    key: bytes, value: Any, serializer: str = "plain", allocate: Callable[[int], bytearray] = bytearray
) -> bytearray:
    """Return an entry that still lacks its checksum; it shares no memory with `value`.

    Args:
        allocate: returns that many bytes, of any content; "pickle" does without it.

    Raises:
        TypeError, ValueError: see `write_payload`; with "pickle", what `pickle.dumps` raises.
    """
    if serializer == "pickle":
        frame = bytearray().join([bytes(_HEAD.size), pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)])
    else:
        frame = write_payload(value, _HEAD.size, allocate)
    _HEAD.pack_into(frame, 0, _MAGIC, SERIALIZERS[serializer], 0, 0, len(frame) - _HEAD.size, key)
    return frame


def seal_frame(frame: bytearray) -> None:
    """Put in the checksum. It takes a while for large entries, so the writing thread does it."""
    kind = _CRC32 if xxh3_64 is None else _XXH3
    frame[_KIND_AT] = kind
    struct.pack_into("<Q", frame, _CHECKSUM_AT, _checksum(frame, kind))


def read_frame(key: bytes, frame: Buffer, serializer: str = "plain", copy: bool = True) -> Any:
    """Return the value of an entry.

    Args:
        copy: whether to copy the entry first. Without it tensors are views of `frame`, which must be a bytearray
            that nobody else uses.

    Raises:
        ValueError: the entry is cut off, altered, another sample's, or of another serializer: a miss.
    """
    whole = memoryview(bytearray(frame) if copy else frame)
    if len(whole) < _HEAD.size:
        raise ValueError("damaged entry: it is too short")
    magic, code, kind, checksum, nbytes, owner = _HEAD.unpack_from(whole)
    if magic != _MAGIC or owner != key or code != SERIALIZERS[serializer] or nbytes != len(whole) - _HEAD.size:
        raise ValueError("damaged entry: its header belongs to another entry")
    if checksum != _checksum(whole, kind):
        raise ValueError("damaged entry: wrong checksum")
    payload = whole[_HEAD.size :]
    return pickle.loads(payload) if serializer == "pickle" else read_payload(payload)


def _checksum(frame: Buffer, kind: int) -> int:
    """The checksum of a whole entry without the field it is in.

    Raises:
        ValueError: a kind that this process does not know, or cannot compute: it lacks xxhash.
    """
    whole = memoryview(frame)
    before, after = whole[:_CHECKSUM_AT], whole[_CHECKSUM_AT + 8 :]
    if kind == _CRC32:
        return zlib.crc32(after, zlib.crc32(before))
    if kind == _XXH3 and xxh3_64 is not None:
        digest = xxh3_64(before)
        digest.update(after)
        return digest.intdigest()
    raise ValueError("damaged entry: unknown kind of checksum")
