"""Protocol by which a reducer reports backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bagua.engine.reducer.bucket import Bucket
from bagua.errors import CommunicationError

__all__ = ["PassListener"]


class PassListener(Protocol):
    """Receives the events of a module's synchronised backward passes."""

    def pass_begins(self) -> None:
        """Before each pass."""
        ...

    def order_learned(self, seen: list[int]) -> None:
        """At the end of the first pass, with the order of arrival; makes the buckets."""
        ...

    def bucket_ready(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are in place; called in order."""
        ...

    def buckets_done(self) -> None:
        """Every bucket has been announced; the pass then counts as done."""
        ...

    def params_missing(self, indices: Sequence[int]) -> None:
        """This rank did not use these parameters; called before their buckets are announced."""
        ...

    def params_unused(self, indices: Sequence[int]) -> None:
        """No rank used these parameters; called after `finish_exchanges`, if there was an exchange."""
        ...

    def finish_exchanges(self, *, on_host: bool = True) -> None:
        """Return when all exchanges are over; called before missing gradients are settled.

        Args:
            on_host: False: it is enough if work that is enqueued from now on comes after them.
        """
        ...

    def pass_lost(self, error: CommunicationError) -> bool:
        """What ranks do together has failed. Whether the pass ends here all the same, without gradients."""
        ...

    def pass_broke_off(self) -> None:
        """An exception interrupted a pass; must not raise."""
        ...
