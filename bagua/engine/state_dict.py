"""The algorithm's own state as plain data, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bagua.comm.groups import Groups
from bagua.engine.reducer.bucket import Bucket
from bagua.exchanges import Exchange, State

__all__ = [
    "States",
    "check_header",
    "check_layout",
    "check_order",
    "load_states",
    "naming_optimizers",
    "other_optimizers",
    "pack",
]

_VERSION = 3
States = dict[tuple[Exchange, int, int], State]
"""By exchange, bucket, and part of the bucket."""


def pack(header: dict[str, Any], states: States, tensors: Mapping[tuple[str, int], Tensor]) -> dict[str, Any]:
    """Return `header`, the exchanges' states and the algorithm's tensors as plain data (copies)."""
    return {
        "version": _VERSION,
        **header,
        "states": [
            {
                "exchange": repr(exchange),
                "bucket": bucket,
                "part": part,
                "tensors": {key: tensor.clone() for key, tensor in state.items()},
            }
            for (exchange, bucket, part), state in states.items()
            if state
        ],
        "tensors": [
            {"name": name, "bucket": bucket, "value": value.clone()} for (name, bucket), value in tensors.items()
        ],
    }


def check_header(data: dict[str, Any], have: dict[str, Any]) -> None:
    """Refuse data that was saved with another configuration than `have`.

    Raises:
        ValueError: names the first entry that differs.
    """
    if "version" not in data:
        raise ValueError(
            "state dict: not made by bagua.state_dict(), as it has no 'version'; "
            "pass what bagua.state_dict(model) returned on this rank"
        )
    if data["version"] != _VERSION:
        raise ValueError(f"state dict: version {data['version']!r}, expected {_VERSION}: another Bagua made it")
    for what, value in have.items():
        if data.get(what) != value:
            raise ValueError(f"state dict: saved with {what} {data.get(what)}, loaded into {what} {value}")


def check_order(data: dict[str, Any], order: Sequence[int]) -> None:
    """Refuse the state of exchanges between ranks in another order than `order`: it is of other peers and chunks.

    Raises:
        ValueError: says how to get that order.
    """
    plain = list(range(data["size"]))
    saved, have = list(data.get("rank_order") or plain), list(order) or plain
    if data["states"] and saved != have:
        raise ValueError(
            f"state dict: saved with rank_order {saved}, loaded into {have}; "
            f"pass rank_order={saved} to bagua.distribute()"
        )


@contextmanager
def naming_optimizers(saved: Sequence[str] | None, now: Sequence[str]) -> Iterator[None]:
    """State of an algorithm that does not fit: say whether the optimizers are of other kinds than when it was saved."""
    try:
        yield
    except ValueError as error:
        if other := other_optimizers(saved, now):
            raise ValueError(
                f"{error}; {other}, and the algorithm keeps state for them: load model and optimizers before "
                "bagua.distribute(), and the algorithm starts anew"
            ) from error
        raise


def other_optimizers(saved: Sequence[str] | None, now: Sequence[str]) -> str:
    """Return a remark if optimizers are of other kinds than when a state was saved; else "".

    Args:
        saved: their kinds; None: an earlier version did not save them.
        now: those of now.
    """
    if saved is None or list(saved) == list(now):
        return ""
    were, are = (", ".join(kinds) or "none" for kinds in (saved, now))
    return f"the optimizers were {were} when it was saved and are {are} now"


def check_layout(exchange: Exchange, saved: Mapping[str, Tensor], made: Mapping[str, Tensor], where: str) -> None:
    """Refuse a state of other elements than those that this rank has.

    Raises:
        ValueError: says which.
    """
    for key in exchange.layout:
        has, wants = (state[key].tolist() if key in state else None for state in (saved, made))
        if has != wants:
            raise ValueError(
                f"{where}: {key} is {has}, not {wants}; the ranks were at other sites, or it is of an earlier version"
            )


@torch.no_grad()
def load_states(
    data: dict[str, Any],
    states: States,
    tensors: dict[tuple[str, int], Tensor],
    buckets: Sequence[Bucket],
    groups: Groups,
) -> None:
    """Copy what `pack` packed into `states` and `tensors`; all or nothing. Tensors not yet made are made.

    Raises:
        ValueError: there is no place for an entry, or it has another shape.
    """
    known = {(repr(key[0]), *key[1:]): (key[0], state) for key, state in states.items()}
    fitted: list[tuple[State, str, Tensor]] = []
    outdated = {repr(exchange): set(exchange.outdated) for exchange, _, _ in states}
    for entry in data["states"]:
        where = f"state dict: {entry['exchange']}, bucket {entry['bucket']}, part {entry['part']}"
        exchange, state = known.get((entry["exchange"], entry["bucket"], entry["part"]), (None, None))
        if exchange is not None and state is not None:
            check_layout(exchange, entry["tensors"], state, where)
        extra = entry["tensors"].keys() - state.keys() if state is not None else set[str]()
        if (
            exchange is None
            or state is None
            or state.keys() - entry["tensors"].keys()
            or extra - outdated[entry["exchange"]]
        ):
            raise ValueError(f"{where}: unexpected tensors {', '.join(entry['tensors'])}")
        for key, tensor in entry["tensors"].items():
            if key in extra:
                continue
            fits = tensor if tensor.shape == state[key].shape else exchange.fit(key, tensor, state[key], groups)
            if fits is None:
                raise ValueError(f"{where}: {key} has shape {list(tensor.shape)}, not {list(state[key].shape)}")
            fitted.append((state, key, fits))
    for entry in data["tensors"]:
        where = f"state dict: {entry['name']} of bucket {entry['bucket']}"
        if not 0 <= entry["bucket"] < len(buckets):
            raise ValueError(f"{where}: the module has no such bucket")
        key, flat = (entry["name"], entry["bucket"]), buckets[entry["bucket"]].flat
        made = tensors.get(key)
        if entry["value"].shape != (flat if made is None else made).shape:
            wanted = list((flat if made is None else made).shape)
            raise ValueError(f"{where} has shape {list(entry['value'].shape)}, not {wanted}")
    for entry in data["tensors"]:
        key = (entry["name"], entry["bucket"])
        if key not in tensors:  # made by the algorithm on first use
            tensors[key] = torch.empty_like(buckets[entry["bucket"]].flat)
        tensors[key].copy_(entry["value"])
    for state, key, value in fitted:
        if state[key].shape == value.shape:
            state[key].copy_(value)
        else:
            state[key] = value.to(state[key].device, copy=True)
