"""Splits the options that a framework's user gives: the algorithm's own, and those of `bagua.distribute`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from bagua.algorithms import Algorithm
from bagua.algorithms.auto import get_or_auto
from bagua.algorithms.registry import registry
from bagua.engine import distribute

__all__ = ["split_options"]


def split_options(
    algorithm: str | Algorithm, options: Mapping[str, Any], provided: Collection[str] = ()
) -> tuple[Algorithm, dict[str, Any]]:
    """Return the algorithm with its options, and the arguments that are left for `bagua.distribute`.

    Args:
        algorithm: a name from `bagua.algorithms.available()`, "auto", or an instance.
        options: of the algorithm, and keyword arguments of `bagua.distribute`.
        provided: names of arguments of `bagua.distribute` that are not the user's to give.

    Raises:
        TypeError, ValueError: an option is unknown or cannot be given; names it.
    """
    for name in options:
        if name in provided:
            raise TypeError(f"{name}: not an option here; the integration provides it")
    names = {
        name
        for name, parameter in inspect.signature(distribute).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    } - {"hierarchical"}
    of_engine = {name: value for name, value in options.items() if name in names}
    of_algorithm = {name: value for name, value in options.items() if name not in names}
    if of_algorithm.get("hierarchical", False) is None:
        del of_algorithm["hierarchical"]  # the algorithm's default
    return get_or_auto(registry, algorithm, of_algorithm), of_engine
