"""Where the parameters of a module lie in memory, while another engine takes over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from bagua.engine.lanes.lane import Lane

__all__ = ["unless_it_fails"]


@contextmanager
def unless_it_fails(params: Iterable[nn.Parameter], lane: Lane, remember: bool) -> Iterator[None]:
    """Within it an engine is made; if that fails, parameters are put back and `lane` is closed.

    Args:
        remember: they are views of another engine's buckets, and become these views again. Else they get storage of
            their own, so that the old one can be freed meanwhile.
    """
    given = list(params)
    homes = [param.data for param in given] if remember else None
    try:
        yield
    except BaseException:
        for index, param in enumerate(given):
            if homes is not None:
                param.data = homes[index]
            elif param.untyped_storage().nbytes() > param.nbytes:
                param.data = param.data.clone()
        lane.close()
        raise
