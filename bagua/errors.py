"""The errors of Bagua that are not plain `ValueError`, `TypeError` or `RuntimeError`."""

from __future__ import annotations

__all__ = ["CommunicationError", "RankMismatchError"]


class CommunicationError(RuntimeError):
    """An exchange failed, or a rank did not take part in it within the timeout.

    The message names the step, the bucket and, if known, the rank. The cause is chained.

    Attributes:
        flight_recorder: where an exchange of a distributed module failed on gloo: torch's record of the last
            collectives on this rank, as `pickle.dumps` of plain data. None elsewhere, or if torch records nothing.
    """

    flight_recorder: bytes | None = None


class RankMismatchError(ValueError):
    """Ranks passed different models, options or orders, or the arguments of one rank are invalid.

    Raised on every rank, before any collective starts.
    """
