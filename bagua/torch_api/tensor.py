"""`BaguaTensor` of the original, which were methods on every tensor: tensors are left as they are."""

from __future__ import annotations

from bagua.gone import Gone

__all__ = ["BaguaTensor"]

BaguaTensor = Gone(
    "BaguaTensor",
    "the engine schedules tensors by itself: a subclass of bagua.Algorithm says what is exchanged and when",
)
