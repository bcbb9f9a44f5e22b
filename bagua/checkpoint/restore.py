"""Restore modules, optimizers and algorithms from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from bagua.checkpoint.agree import agree_on
from bagua.checkpoint.errors import CheckpointError, MisfitError
from bagua.checkpoint.experts import check_optimizer, is_expert, spread_experts
from bagua.checkpoint.items import RNG, algorithm_item, kind_of, set_random_state
from bagua.checkpoint.reshard import (
    for_other_size,
    load_algorithm,
    mean_module,
    mean_optimizer,
)
from bagua.checkpoint.tolerant import LOAD_BEFORE, refuse_fault_tolerant
from bagua.comm.team import Team
from bagua.engine.hooks import attachments
from bagua.engine.startup.rank_local import rank_local_names
from bagua.engine.state_dict import check_header, other_optimizers

__all__ = ["Found", "restore", "wanted"]


@dataclass(frozen=True)
class Found:
    """What was read.

    Attributes:
        where: for messages.
        size: number of ranks that saved it.
        kinds: of the items.
        parts: for each item this rank's copy, or if the number of ranks has changed all copies, by rank.
    """

    where: str
    size: int
    kinds: dict[str, str]
    parts: dict[str, list[Any]]


def wanted(kinds: Mapping[str, str], objects: Mapping[str, Any], where: str) -> list[str]:
    """The items that are needed for `objects`, and all plain data.

    Raises:
        CheckpointError: there is no such item, or one of another kind.
    """
    names = [name for name, kind in kinds.items() if kind == "data"]
    for name, value in objects.items():
        kind = kind_of(value)
        if name not in kinds:
            known = ", ".join(item for item in kinds if "." not in item) or "nothing"
            raise CheckpointError(f"{where} has no {name!r}; it holds {known}")
        if kinds[name] != kind:
            raise CheckpointError(f"{where}: {name!r} was saved as {kinds[name]!r} but is {kind!r} now")
        if kind == "data":
            continue
        names.append(name)
        if isinstance(value, nn.Module) and value in attachments:
            if algorithm_item(name) not in kinds:
                raise CheckpointError(
                    f"{where}: {name!r} was not distributed when it was saved, so the checkpoint has no "
                    "algorithm state; "
                    "load it before bagua.distribute()"
                )
            names.append(algorithm_item(name))
    return [*names, RNG] if RNG in kinds else names


def restore(found: Found, objects: Mapping[str, Any], team: Team, *, rng: bool) -> dict[str, Any]:
    """Put `found` into `objects`; returns the plain data. Collective.

    Raises:
        CheckpointError: something does not go with the number of ranks that there are now, or another rank failed.
        MisfitError: another algorithm runs now, or its state does not fit; names it.
        Exception: of an object, where its state does not fit.
    """
    return agree_on(team, f"loading from {found.where}", lambda: _put(found, objects, team, rng))


def _put(found: Found, objects: Mapping[str, Any], team: Team, rng: bool) -> dict[str, Any]:
    same = found.size == team.size
    _check_algorithms(found, objects)
    data = {
        name: copies[0] if same else for_other_size(name, copies, found.where)
        for name, copies in found.parts.items()
        if found.kinds[name] == "data"
    }
    experts: dict[str, dict[str, Any]] = {}
    if not same:  # before anything has changed
        modules = [module for _, module in _of_kind(objects, "module")]
        for name, optimizer in _of_kind(objects, "optimizer"):
            check_optimizer(name, optimizer, modules, found.size, found.where)
        for name, module in _of_kind(objects, "module"):
            experts[name] = spread_experts(found.parts[name], module, team.rank, team.size, f"{found.where}: {name}")
    for name, module in _of_kind(objects, "module"):
        copies = found.parts[name]
        parameters = {path for path, _ in module.named_parameters(remove_duplicate=False)}  # tied ones by every name
        module.load_state_dict(copies[0] if same else _other_size(copies, parameters, experts[name], module))
    for name, optimizer in _of_kind(objects, "optimizer"):
        copies = found.parts[name]
        optimizer.load_state_dict(copies[0] if same else mean_optimizer(copies))
    for name, module in _of_kind(objects, "module"):  # after the weights, of which replicas may be made
        if module in attachments:
            copies = found.parts[algorithm_item(name)]
            engine = attachments[module].engine
            with _misfit(f"{found.where}: {name}"):
                if same:
                    engine.load_state_dict(copies[0])
                else:
                    load_algorithm(engine, copies, f"{found.where}: {name}")
    for name, value in _of_kind(objects, "stateful"):
        copies = found.parts[name]
        value.load_state_dict(copies[0] if same else for_other_size(name, copies, found.where))
    if rng and same and RNG in found.parts:
        set_random_state(found.parts[RNG][0])
    return data


def _other_size(copies: list[Any], parameters: set[str], experts: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    if not experts:
        return mean_module(copies, parameters)
    own = rank_local_names(module)
    lean = [{name: value for name, value in copy.items() if not is_expert(name)} for copy in copies]
    return {**mean_module(lean, parameters - own), **experts}


def _of_kind(objects: Mapping[str, Any], kind: str) -> Iterable[tuple[str, Any]]:
    return ((name, value) for name, value in objects.items() if kind_of(value) == kind)


def _check_algorithms(found: Found, objects: Mapping[str, Any]) -> None:
    """Before anything has changed: each module runs the algorithm that it was saved with, on the same parameters.

    Raises:
        MisfitError: names what differs.
        CheckpointError: a module is fault-tolerant.
    """
    refuse_fault_tolerant(objects, found.where, LOAD_BEFORE)
    for name, module in _of_kind(objects, "module"):
        if module in attachments:
            engine, saved = attachments[module].engine, found.parts[algorithm_item(name)][0]
            with _misfit(f"{found.where}: {name}"):
                check_header(saved, {})
            if engine.form_of(saved.get("algorithm")) is None:
                other = other_optimizers(saved.get("optimizers"), engine.kinds)
                raise MisfitError(
                    f"{found.where}: {name}: saved with algorithm {saved.get('algorithm')}, loaded into algorithm "
                    f"{engine.state.root!r}{other and f' ({other})'}; pass the same algorithm and options to "
                    "bagua.distribute(), or load the weights before bagua.distribute(), and the algorithm starts anew"
                )
            with _misfit(f"{found.where}: {name}"):
                engine.check_parameters(saved)


@contextmanager
def _misfit(where: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise MisfitError(f"{where}: {error}") from error
