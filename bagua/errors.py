"""The errors of Bagua that are not plain `ValueError`, `TypeError` or `RuntimeError`."""

from __future__ import annotations

__all__ = ["CommunicationError", "RankMismatchError"]


class CommunicationError(RuntimeError):
    """An exchange failed, or a rank did not take part in one within the timeout.

    The message names the step, the bucket and, where it can be known, the rank. The cause is chained.
    """


class RankMismatchError(ValueError):
    """Ranks came with different models, options or orders, or one of them failed to validate its own.

    Raised on every rank, before any collective starts.
    """
