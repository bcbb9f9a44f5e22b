"""Deletes what groups of former members, and transfers of weights, have left in the store of the first member."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from bagua.comm.store import BoundedStore
from bagua.comm.team import Team
from bagua.errors import CommunicationError

__all__ = ["delete_below", "delete_old_groups", "prefix_of_group", "prefix_of_weights"]

_GROUPS = "bagua/group/"


def prefix_of_group(number: int) -> str:
    """Of the keys of the groups that the epoch of that number has opened."""
    return f"{_GROUPS}{number}"


def prefix_of_weights(learner: str) -> str:
    """Of the keys by which a host that joins asks for the weights and gets them."""
    return f"bagua/weights/{learner}"


def delete_old_groups(team: Team, *kept: int) -> None:
    """On the first rank, when new groups are open: delete the keys of all groups but those.

    The other members are in the new groups by then. A rank that has been left out and still waits at a key of its old
    group is alerted, see `Team.alert`; what it writes there later is deleted at the next change. Groups meet in the
    store of the launcher beside this rank, so this takes no time on the network.

    Args:
        kept: numbers of the epochs that have opened them.
    """
    if team.rank == 0:
        _delete(team.store, lambda key: _group_of(key) not in (None, *kept))


def delete_below(store: BoundedStore, prefix: str) -> None:
    """Delete all keys below `prefix`, whatever the prefix of `store`. Quietly, if the store is gone."""
    _delete(store, lambda key: key.startswith(f"{prefix}/"))


def _delete(store: BoundedStore, unwanted: Callable[[str], bool]) -> None:
    with suppress(CommunicationError):
        root = store.root  # a `PrefixStore` of torch lists keys of longer prefixes too
        for key in filter(unwanted, root.list_keys()):
            root.delete_key(key)


def _group_of(key: str) -> int | None:
    number, _, _ = key.removeprefix(_GROUPS).partition("/")
    return int(number) if key.startswith(_GROUPS) and number.isdecimal() else None
