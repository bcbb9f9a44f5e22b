"""The original's `Algorithm` and its registry: names for algorithms of `bagua.algorithms`, and scripts' own."""

from __future__ import annotations

from typing import Any

import bagua.algorithms
from bagua.torch_api.algorithms.impl import AlgorithmImpl

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "UnknownAlgorithmError",
    "as_core_algorithm",
    "is_written_for_original",
]

_OWN = (
    "an algorithm of your own is a subclass of bagua.Algorithm, whose instances with_bagua() takes too, or defines "
    "reify() and returns an AlgorithmImpl there"
)


class Algorithm:
    """What `with_bagua` takes. A subclass names a core algorithm and its options (`core`), or overrides `reify`."""

    @property
    def core(self) -> bagua.algorithms.Algorithm:
        """The algorithm as `bagua.distribute` takes it.

        Raises:
            TypeError: a subclass that is not of this package.
        """
        raise TypeError(f"algorithm: {type(self).__qualname__} has no counterpart in bagua.algorithms; {_OWN}")

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """Return the registered algorithm `name`, made with `kwargs`.

        Raises:
            UnknownAlgorithmError: no such name; it is a KeyError and a ValueError.
            TypeError: the algorithm has no such argument.
        """
        return GlobalAlgorithmRegistry.get(name)(**kwargs)

    def reify(self, process_group: Any) -> Any:
        """Return the `AlgorithmImpl` that runs this algorithm for one module; overridden by algorithms of scripts.

        Args:
            process_group: the `BaguaProcessGroup` of the module.

        Raises:
            NotImplementedError: unless it is overridden. The engine drives the facade's own algorithms.
        """
        raise NotImplementedError(
            f"{type(self).__qualname__}.reify(): the engine runs it itself, without an AlgorithmImpl; {_OWN}"
        )


def is_written_for_original(algorithm: Any) -> bool:
    """Whether `algorithm` runs through an `AlgorithmImpl` of its own."""
    return isinstance(algorithm, Algorithm) and type(algorithm).reify is not Algorithm.reify


class UnknownAlgorithmError(KeyError, ValueError):
    """No algorithm has that name. A `KeyError` as in the original, a `ValueError` as elsewhere here."""

    def __str__(self) -> str:
        return str(self.args[0])


class AlgorithmRegistry(dict[str, dict[str, Any]]):
    """Algorithms by name: {"algorithm": class, "description": text} each."""

    def register(self, name: str, algorithm: type[Algorithm], description: str | None = None) -> None:
        """Make `algorithm` known as `name`.

        Raises:
            TypeError: `name` is no string, or `algorithm` no subclass of `Algorithm`.
            ValueError: the name is taken by another class.
        """
        if not isinstance(name, str):
            raise TypeError(f"name: expected a str, got {type(name).__name__}")
        if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
            raise TypeError(
                f"algorithm: expected a subclass of bagua.torch_api.algorithms.Algorithm, got {algorithm!r}"
            )
        if name in self and self[name]["algorithm"] is not algorithm:
            raise ValueError(f"name: {name!r} is already registered as {self[name]['algorithm'].__qualname__}")
        self[name] = {"algorithm": algorithm, "description": description or ""}

    def get(self, name: str) -> type[Algorithm]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the class registered as `name`.

        Raises:
            UnknownAlgorithmError: no such name.
        """
        if name not in self:
            raise UnknownAlgorithmError(f"name: algorithm {name!r} is unknown; available: {', '.join(self)}")
        return self[name]["algorithm"]

    def available_algorithms(self) -> list[str]:
        """All names."""
        return list(self)

    def __str__(self) -> str:
        return f"Registered Algorithms: {', '.join(self)}"


GlobalAlgorithmRegistry = AlgorithmRegistry()


def as_core_algorithm(algorithm: Any) -> bagua.algorithms.Algorithm:
    """Return what `bagua.distribute` takes for the facade's algorithm, a name, or a `bagua.Algorithm`.

    Raises:
        ValueError: an unknown name.
        TypeError: anything else.
    """
    if isinstance(algorithm, str):
        algorithm = Algorithm.init(algorithm)
    if isinstance(algorithm, Algorithm):
        return algorithm.core
    if isinstance(algorithm, bagua.algorithms.Algorithm):
        return algorithm
    if isinstance(algorithm, AlgorithmImpl):
        raise TypeError(
            f"algorithm: {type(algorithm).__qualname__} is an AlgorithmImpl; give the Algorithm that reifies it"
        )
    got = algorithm.__qualname__ if isinstance(algorithm, type) else type(algorithm).__name__
    raise TypeError(
        f"algorithm: expected an object of bagua.torch_api.algorithms such as GradientAllReduceAlgorithm() "
        f"or a bagua.Algorithm, got {got}"
    )
