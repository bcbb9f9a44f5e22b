"""Who has to keep to the contracts: the library, and `bagua.contrib`, which is registered nowhere else in tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import bagua
from bagua.algorithms import Algorithm
from bagua.algorithms.registry import registry as algorithms
from bagua.codecs import Codec
from bagua.codecs.registry import registry as codecs

__all__ = ["CONTRIB_ALGORITHMS", "CONTRIB_CODECS", "algorithm_classes", "codec_classes", "registered"]


def _contrib() -> tuple[dict[str, type[Algorithm]], dict[str, type[Codec]]]:
    """Import it, and take out of the registries what is from there: other tests list what the library has.

    Another test module may have imported it before.
    """
    import_module("bagua.contrib")

    def of_contrib(made: type) -> bool:
        return made.__module__.startswith("bagua.contrib.")

    found = (
        {name: algorithms[name] for name in algorithms if of_contrib(algorithms[name])},
        {name: codecs[name] for name in codecs if of_contrib(codecs[name])},
    )
    for registry, classes in zip((algorithms, codecs), found, strict=True):
        for name in classes:
            registry.unregister(name)
    return found


CONTRIB_ALGORITHMS, CONTRIB_CODECS = _contrib()


@contextmanager
def registered() -> Iterator[None]:
    """The names of `bagua.contrib` are known meanwhile, as to anybody who imports it."""
    both = ((algorithms, CONTRIB_ALGORITHMS), (codecs, CONTRIB_CODECS))
    for registry, classes in both:
        for each in classes.values():
            registry.register(each)
    try:
        yield
    finally:
        for registry, classes in both:
            for name in classes:
                registry.unregister(name)


def algorithm_classes() -> dict[str, type[Algorithm]]:
    """By name."""
    names = [row.name for row in bagua.algorithms.available(builtin_only=True)]
    return {name: algorithms[name] for name in names} | CONTRIB_ALGORITHMS


def codec_classes() -> dict[str, type[Codec]]:
    """By name."""
    return {name: codecs[name] for name in bagua.codecs.available(builtin_only=True)} | CONTRIB_CODECS
