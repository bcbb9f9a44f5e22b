"""One registry and one form of its errors for algorithms, codecs and topologies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from bagua import algorithms, codecs, topologies
from bagua.registry import Registry

REGISTRIES: dict[str, tuple[Any, Registry[Any]]] = {
    "algorithm": (algorithms, algorithms.registry.registry),
    "codec": (codecs, codecs.registry.registry),
    "topology": (topologies, topologies.registry.registry),
}


@pytest.fixture(params=REGISTRIES)
def noun(request: pytest.FixtureRequest) -> str:
    """What is registered."""
    return request.param


def test_names_and_instances(noun: str) -> None:
    package, registry = REGISTRIES[noun]
    for name in registry:
        made = package.get(name)
        assert type(made) is registry[name] and made.name == name and name in registry
        assert package.get(made) is made
    assert "torus" not in registry and len(registry) == len(list(registry))


def test_errors_have_one_form(noun: str) -> None:
    package, registry = REGISTRIES[noun]
    first = next(iter(registry))
    with pytest.raises(ValueError, match=f"{noun} 'none such' is unknown; available: .*{first}"):
        package.get("none such")
    with pytest.raises(TypeError, match=f"{noun}: expected a name or an? {noun.capitalize()}, got int"):
        package.get(3)
    with pytest.raises(ValueError, match=f"{noun} '{first}' has no option 'colour'; it has: "):
        package.get(first, colour=1)
    with pytest.raises(ValueError, match=f"{noun}: got an instance and options colour; pass the options to"):
        package.get(package.get(first), colour=1)


def test_registering(noun: str) -> None:
    package, registry = REGISTRIES[noun]
    base = registry[next(iter(registry))]

    @package.register
    @dataclass(frozen=True)
    class Mine(base):
        name = "mine"

    try:
        assert package.register(Mine) is Mine
        assert isinstance(package.get("mine"), Mine)

        @dataclass(frozen=True)
        class Other(base):
            name = "mine"

        with pytest.raises(ValueError, match=rf"{noun} 'mine' is already registered as .*Mine"):
            package.register(Other)
        assert "mine" not in registry.builtin() and set(registry.builtin()) < set(registry)
        assert registry.register(Other, replace=True) is Other
    finally:
        registry.unregister("mine")
    with pytest.raises(TypeError, match="expected a subclass of"):
        package.register(int)

    @dataclass(frozen=True)
    class Nameless(base):
        name = ""

    with pytest.raises(ValueError, match="Nameless has no `name`"):
        package.register(Nameless)


@dataclass(frozen=True)
class Thing:
    """Options of plain types, of several, and of one that only the class can check."""

    name: ClassVar[str] = "thing"

    count: int = 1
    rate: float | None = 0.5
    fast: bool = True
    label: str = ""
    other: int | list[int] = 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": "3"}, "'count': expected an int, got '3'"),
        ({"count": True}, "'count': expected an int, got True"),
        ({"count": 1.5}, "'count': expected an int, got 1.5"),
        ({"count": None}, "'count': expected an int, got None"),
        ({"rate": "fast"}, "'rate': expected a float or None, got 'fast'"),
        ({"fast": 1}, "'fast': expected a bool, got 1"),
        ({"label": 3}, "'label': expected a str, got 3"),
    ],
)
def test_options_of_plain_types_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    registry = Registry("thing", Thing)
    registry.register(Thing)
    with pytest.raises(ValueError, match=f"thing 'thing', option {message}"):
        registry.get("thing", **options)


def test_options_of_plain_types_are_taken() -> None:
    registry = Registry("thing", Thing)
    registry.register(Thing)
    assert registry.get("thing", count=np.int64(3), rate=1, label="x") == Thing(3, 1, True, "x")
    assert registry.get("thing", rate=None, other=[1]) == Thing(rate=None, other=[1])
