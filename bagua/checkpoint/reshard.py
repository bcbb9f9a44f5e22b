"""Resharding: conversion of the state of R ranks to another number of ranks.

| what | rule |
|---|---|
| weights | their mean over the ranks, as `bagua.distribute` takes it when it switches; buffers: rank 0's |
| optimizers | the mean of their tensors; numbers and single-element tensors: rank 0's |
| residuals of error feedback | every rank gets the mean: what is still owed to the mean gradient stays the same |
| residuals of owned chunks | concatenated and split again; two ranks add them to what they owe |
| any state of the share that a host of a site has | put together, as above, and cut again |
| right factors of PowerSGD | unchanged; they are equal on all ranks |
| replicas of gossip | created from the weights, which are equal now |
| gossip in flight (`overlap=True`) | dropped |
| samples of mean gradients (`gradient_interval`) | dropped: how much noise a mean has depends on the number of ranks |
| any other state | unchanged if equal on all ranks, else refused by name |

With one rank nothing is exchanged, so residuals are dropped on the way to it, and start at zero on the way from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.algorithms import AsyncModelAverage, Decentralized, DiLoCo, LocalSGD, LowPrecisionDecentralized, SparseLoCo
from bagua.checkpoint.errors import CheckpointError
from bagua.checkpoint.subclasses import is_subclass, parts_of
from bagua.engine.engine import Engine
from bagua.exchanges import DifferenceGossip, Exchange, Hierarchical, PowerSGD, ScatterGather
from bagua.exchanges.scatter_gather import is_of_all

__all__ = ["for_other_size", "load_algorithm", "mean_module", "mean_optimizer"]

# By class and name of the tensor. Classes of users say it in a class variable `resharding`.
_EXCHANGES: dict[type, dict[str, str]] = {
    ScatterGather: {"residual": "mean", "chunk_residual": "chunks", "magnitude": "equal"},
    PowerSGD: {"right": "equal", "error": "mean"},
    DifferenceGossip: {"me": "weights", "peers": "weights"},
}
_SCALED = {"second_moment": "fresh", "adam_steps": "fresh"}  # the next correction takes the moments as they are
_OF_ROUNDS = ("momenta", "second", "size", "counts", "taken", "skips", "sums", "changed")
_ROUNDS = {**_SCALED, **dict.fromkeys(_OF_ROUNDS, "fresh")}
_SAMPLED = {**_SCALED, "squares": "fresh"}  # the noise of a mean depends on the number of ranks
_ALGORITHMS: dict[type, dict[str, str]] = {
    AsyncModelAverage: _SCALED,
    Decentralized: {
        **_SAMPLED,
        "first": "fresh",
        "second": "fresh",
        "size": "fresh",
        "counts": "fresh",
        "sums": "fresh",
    },
    DiLoCo: _ROUNDS,
    LocalSGD: _ROUNDS,
    LowPrecisionDecentralized: {"pending": "fresh", "snapshot": "fresh", "mixed": "fresh", **_SAMPLED},
    SparseLoCo: {"anchor": "equal", "residual": "mean"},
}
_RULES = ("mean", "chunks", "equal", "weights", "fresh")


def equal(left: Any, right: Any) -> bool:
    """Whether plain data is the same to the last bit."""
    if isinstance(left, Tensor) and is_subclass(left):
        return type(left) is type(right) and left.shape == right.shape and equal(parts_of(left), parts_of(right))
    if isinstance(left, Tensor):
        return (
            isinstance(right, Tensor)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and torch.equal(_bits(left), _bits(right))
        )
    if isinstance(left, dict):
        same = isinstance(right, dict) and left.keys() == right.keys()
        return same and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and (left == right or (left != left and right != right))


def _bits(x: Tensor) -> Tensor:
    """NaN is equal to itself here."""
    return x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else x.detach().new_empty(0).view(-1)


def for_other_size(name: str, copies: Sequence[Any], where: str) -> Any:
    """One of `copies`, if all are equal.

    Raises:
        CheckpointError: they differ, and no resharding rule applies.
    """
    for rank, copy in enumerate(copies):
        if not equal(copy, copies[0]):
            raise CheckpointError(
                f"{where}: {name!r} of rank {rank} differs from rank 0's, so it cannot be loaded on another number "
                f"of ranks than {len(copies)}"
            )
    return copies[0]


def mean(copies: Sequence[Tensor]) -> Tensor:
    """The mean of equal or different tensors; of integers and of tensor subclasses the first one."""
    first = copies[0]
    if is_subclass(first):
        return first
    if not first.is_floating_point() or all(equal(copy, first) for copy in copies):
        return first.clone()
    total = torch.zeros(first.shape, dtype=torch.float64, device="cpu")
    for copy in copies:
        total += copy
    return (total / len(copies)).to(first.dtype)


def mean_module(copies: Sequence[Mapping[str, Any]], parameters: set[str]) -> dict[str, Any]:
    """The mean of the parameters, and rank 0's buffers."""
    first = copies[0]
    return {name: mean([copy[name] for copy in copies]) if name in parameters else first[name] for name in first}


def mean_optimizer(copies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of the state's tensors; everything else is rank 0's, as `bagua.distribute` has it."""
    return {**copies[0], "state": _mean_tree([copy["state"] for copy in copies])}


def _mean_tree(copies: Sequence[Any]) -> Any:
    first = copies[0]
    alike = [copy for copy in copies if type(copy) is type(first)]
    if isinstance(first, Tensor):
        alike = [copy for copy in alike if copy.shape == first.shape]
        return mean(alike) if first.dim() else first
    if isinstance(first, dict):
        keys = dict.fromkeys(key for copy in alike for key in copy)  # a rank that never used a parameter has no entry
        return {key: _mean_tree([copy[key] for copy in alike if key in copy]) for key in keys}
    return first


def load_algorithm(engine: Engine, copies: Sequence[dict[str, Any]], where: str) -> None:
    """Give `engine` the state that `copies`, one for each rank of old, come to. The weights are loaded already.

    Raises:
        CheckpointError: there is no rule for a tensor; names it.
    """
    first = copies[0]
    copies = [copies[rank] for rank in first.get("rank_order") or range(len(copies))]  # chunks are in that order
    here = {"size": engine.team.size, "rank": engine.team.rank, "replicas_differ": False}  # the weights are means
    engine.load_state_dict({**first, **here, "states": [], "tensors": []})  # step and plan; makes fresh states
    if engine.chooses_anew(first):
        return
    fresh = engine.state_dict()
    states = {(entry["exchange"], entry["bucket"], entry["part"]): entry for entry in fresh["states"]}
    exchanges = {
        (repr(exchange), bucket, part): (exchange, (bucket, part)) for exchange, bucket, part in engine.memory.states
    }
    olds: dict[tuple[str, int, int], list[dict[str, Tensor]]] = {}
    for copy in copies:
        for entry in copy["states"]:
            olds.setdefault((entry["exchange"], entry["bucket"], entry["part"]), []).append(entry["tensors"])
    for key, entry in states.items():
        exchange, (bucket, part) = exchanges[key]
        lo, hi = engine.dispatcher.parts(exchange, bucket)[part]
        weights = engine.buckets[bucket].flat[lo:hi]
        entry["tensors"] = _state(exchange, olds.get(key, []), entry["tensors"], weights, engine, where)
    fresh["tensors"] = _tensors(engine, copies, fresh["tensors"], where)
    fresh["loss_scale"] = first.get("loss_scale")
    engine.load_state_dict(fresh)


def _state(
    exchange: Exchange,
    old: list[dict[str, Tensor]],
    fresh: dict[str, Tensor],
    weights: Tensor,
    engine: Engine,
    where: str,
) -> dict[str, Tensor]:
    """The state of one exchange for one part of a bucket. `old`: of the ranks that had one, in order."""
    inner, groups = exchange, engine.groups
    if isinstance(exchange, Hierarchical):
        inner, groups = exchange.inner, exchange.among(groups)
    group = groups.world if groups is not None else None
    rules = _rules(inner, _EXCHANGES)
    lo, hi = fresh["share"].tolist()[:2] if "share" in fresh else (0, weights.numel())
    shares = _by_share(old, weights.numel())
    n, rank = hi - lo, group.rank if group is not None else 0
    found = _owed(shares)
    owed = found[lo:hi] if found is not None else None
    made = {"share": fresh["share"]} if "share" in fresh else dict[str, Tensor]()
    for name, tensor in fresh.items():
        rule = rules.get(name)
        if name == "share":
            continue
        if rule == "weights":
            made[name] = weights[lo:hi].detach().expand(tensor.shape).clone()
        elif rule == "chunks" and owed is not None:
            every = isinstance(inner, ScatterGather) and group is not None and is_of_all(tensor, n, group.size)
            made[name] = _cut(owed, rank, tensor, every)
        else:
            copies = [copy[lo:hi] if copy.numel() == weights.numel() else copy for copy in _joined(shares, name)]
            what = f"{where}: {name!r} of {exchange.name}"
            made[name] = _apply(rule, copies, tensor, what, _scale(rule, inner, len(copies), group))
    if isinstance(inner, ScatterGather) and owed is not None and "residual" in made and "chunk_residual" not in made:
        assert group is not None
        made["residual"].view(-1).add_(owed, alpha=1.0 if inner.average else 1 / group.size)
    return made


def _by_share(old: list[dict[str, Tensor]], numel: int) -> list[tuple[int, int, list[dict[str, Tensor]]]]:
    """First and last element, exclusive, of each share of a payload of `numel`, and the states of those who have it.

    These are in the order of their sites.
    """
    found: dict[tuple[int, int, int], list[tuple[int, dict[str, Tensor]]]] = {}
    for number, each in enumerate(old):
        lo, hi, place, site = each["share"].tolist() if "share" in each else (0, numel, 0, number)
        found.setdefault((place, lo, hi), []).append((site, each))
    return [
        (lo, hi, [each for _, each in sorted(found[place, lo, hi], key=lambda pair: pair[0])])
        for place, lo, hi in sorted(found)
    ]


def _joined(shares: Sequence[tuple[int, int, list[dict[str, Tensor]]]], name: str) -> list[Tensor]:
    """The tensors called `name`, as if there had been no shares: of each site, or of each rank that had one."""
    copies = [[each[name] for each in having if name in each] for _, _, having in shares]
    if len(copies) == 1:
        return copies[0]
    return [torch.cat(parts) if parts[0].dim() else parts[0] for parts in zip(*copies, strict=True)]


def _owed(shares: Sequence[tuple[int, int, list[dict[str, Tensor]]]]) -> Tensor | None:
    """The residuals of owned chunks, of all elements; None if there were none."""
    found = list[Tensor]()
    for lo, hi, having in shares:
        chunks = [each["chunk_residual"] for each in having if "chunk_residual" in each]
        found += [_together(chunks, hi - lo)] if chunks else []
    return torch.cat(found) if found else None


def _scale(rule: str | None, exchange: Exchange, num_old: int, group: Any) -> float:
    """A residual of a sum, not of a mean, is spread: the sum over the ranks stays the same."""
    average = getattr(exchange, "average", True)
    return 1.0 if average or rule != "mean" or group is None else num_old / group.size


def _tensors(
    engine: Engine, copies: Sequence[dict[str, Any]], fresh: list[dict[str, Any]], where: str
) -> list[dict[str, Any]]:
    """The tensors of the algorithm itself."""
    rules = _rules(engine.algorithm, _ALGORITHMS)
    made = {(entry["name"], entry["bucket"]): entry for entry in fresh}
    olds: dict[tuple[str, int], list[Tensor]] = {}
    for copy in copies:
        for entry in copy["tensors"]:
            olds.setdefault((entry["name"], entry["bucket"]), []).append(entry["value"])
    for (name, bucket), values in olds.items():
        if rules.get(name) == "fresh" and (name, bucket) not in made:
            continue  # the algorithm makes it when it needs one, in a shape of its choice
        what = f"{where}: {name!r} of {engine.algorithm.name}"
        fallback = made[name, bucket]["value"] if (name, bucket) in made else torch.zeros_like(values[0])
        value = _apply(rules.get(name), values, fallback, what, 1.0)
        made[name, bucket] = {"name": name, "bucket": bucket, "value": value}
    return list(made.values())


def _rules(owner: object, table: Mapping[type, dict[str, str]]) -> Mapping[str, str]:
    """How the state of an exchange or algorithm changes hands, by name of the tensor.

    Raises:
        CheckpointError: a class of a user's names a rule that there is not.
    """
    rules = getattr(type(owner), "resharding", None) or table.get(type(owner), {})
    for name, rule in rules.items():
        if rule not in _RULES:
            raise CheckpointError(
                f"{type(owner).__name__}.resharding[{name!r}]: {rule!r} is not a rule; available: {', '.join(_RULES)}"
            )
    return rules


def _apply(rule: str | None, copies: Sequence[Tensor], fresh: Tensor, what: str, scale: float) -> Tensor:
    if not copies or rule == "fresh":
        return fresh
    if rule == "mean" and all(copy.shape == fresh.shape for copy in copies):
        return mean(copies).mul_(scale)
    if all(equal(copy, copies[0]) for copy in copies) and copies[0].shape == fresh.shape:
        return copies[0]
    raise CheckpointError(
        f"{what} differs between the {len(copies)} ranks that saved it, and has no rule for resharding to "
        "another number of "
        "ranks; load it on as many ranks, or before bagua.distribute(), which starts with fresh algorithm state"
    )


def _together(copies: Sequence[Tensor], numel: int) -> Tensor:
    """The `numel` elements whose chunks the ranks of old have, or all of which each of them has."""
    every = is_of_all(copies[0], numel, len(copies))
    return (copies[0] if every else torch.cat(list(copies)))[:numel].view(-1)


def _cut(whole: Tensor, rank: int, fresh: Tensor, every: bool) -> Tensor:
    """Chunk `rank` of it, or every one, in a tensor like `fresh`."""
    c = fresh.numel()
    mine = whole if every else whole[rank * c : (rank + 1) * c]
    chunk = torch.zeros_like(fresh, device=whole.device)
    chunk[: mine.numel()] = mine
    return chunk
