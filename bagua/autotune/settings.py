"""What is tuned: the sizes and numbers by which an engine exchanges what it exchanges anyway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["ALWAYS_DIRECT", "Settings"]

ALWAYS_DIRECT = 1 << 40  # more bytes than any piece has
_MAX_LANES = 64


@dataclass(frozen=True)
class Settings:
    """One point of the space that is searched.

    Attributes:
        bucket_bytes: payload at which a bucket is closed.
        num_lanes: exchanges in progress at once (gloo).
        part_bytes: size of the pieces into which larger buckets are cut; None where buckets are not cut.
        direct_bytes: full-precision sums of pieces up to this size go over the library's own sends, larger ones through
            the backend's all-reduce. Has an effect on gloo only, with one rank a node and at least three nodes.
        hierarchical: sum within each node first.
    """

    bucket_bytes: int
    num_lanes: int
    part_bytes: int | None
    direct_bytes: int
    hierarchical: bool

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Settings:
        """The inverse of `as_json`; trusts nothing.

        Raises:
            ValueError: names the entry that is missing or wrong.
        """
        names = [each.name for each in fields(cls)]
        if not isinstance(data, Mapping) or sorted(data) != sorted(names):
            raise ValueError(f"settings: expected the entries {', '.join(names)}, got {data!r}")
        for name in names:
            if not _fits(name, data[name]):
                raise ValueError(f"settings: {data[name]!r} is not a valid value of {name}")
        return cls(**data)

    def describe(self) -> str:
        """For people: sizes in MiB."""
        parts = [f"buckets of {_size(self.bucket_bytes)}", f"{self.num_lanes} lane{'s' * (self.num_lanes > 1)}"]
        if self.part_bytes is not None:
            parts.append(f"pieces of {_size(self.part_bytes)}")
        if self.direct_bytes >= ALWAYS_DIRECT:
            parts.append("always direct")
        else:
            parts.append(f"direct up to {_size(self.direct_bytes)}" if self.direct_bytes else "never direct")
        return ", ".join([*parts, *(["hierarchical"] if self.hierarchical else [])])


def _fits(name: str, value: object) -> bool:
    if name == "hierarchical":
        return isinstance(value, bool)
    if name == "part_bytes" and value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return 1 <= value <= _MAX_LANES if name == "num_lanes" else value >= (0 if name == "direct_bytes" else 1)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.4g} MiB"
