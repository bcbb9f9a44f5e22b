"""One registry and one form of its errors for algorithms, codecs and topologies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from bagua import algorithms, codecs, topologies
from bagua.algorithms.auto import get_or_auto
from bagua.engine.startup.options import check_options
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


@pytest.mark.parametrize(
    ("noun", "name", "meant"),
    [
        ("algorithm", "allreduce", "'gradient_allreduce'"),
        ("algorithm", "DDP", "'gradient_allreduce'"),
        ("algorithm", "powersgd", "'power_sgd'"),
        ("algorithm", "Local-SGD", "'local_sgd'"),
        ("algorithm", "1bit_adam", "'qadam' with codec='sign'"),
        ("algorithm", "bytegard", "'bytegrad'"),
        ("codec", "int8", "'minmax_uint8'"),
        ("codec", "1bit", "'eden:bits=1'"),
        ("topology", "rign", "'ring'"),
    ],
)
def test_an_unknown_name_is_answered_with_what_may_be_meant(noun: str, name: str, meant: str) -> None:
    package, _ = REGISTRIES[noun]
    with pytest.raises(ValueError, match=re.escape(f"{noun} {name!r} is unknown; did you mean {meant}? available: ")):
        package.get(name)


def test_auto_is_a_name_for_distribute() -> None:
    for name, hint in (("none such", ""), ("atuo", "did you mean 'auto'? ")):
        with pytest.raises(ValueError, match=re.escape(f"{hint}available: auto, gradient_allreduce, ")):
            get_or_auto(REGISTRIES["algorithm"][1], name, {})
    with pytest.raises(ValueError, match="available: gradient_allreduce"):
        algorithms.get("none such")


def test_a_class_is_not_an_instance() -> None:
    with pytest.raises(TypeError, match=re.escape("got the class PowerSGD; pass PowerSGD() or 'power_sgd'")):
        algorithms.get(algorithms.PowerSGD)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=re.escape("expected a name or a Codec, got type")):
        codecs.get(int)  # pyright: ignore[reportArgumentType]


def test_short_name_of_the_default_codec() -> None:
    assert codecs.get("uint8") == codecs.get("minmax_uint8") and codecs.get("uint8:block=64").name == "minmax_uint8"


def test_numbers_of_ranks_and_elements_are_checked() -> None:
    for size in (0, -2, True, 2.5):
        with pytest.raises(ValueError, match="size: expected a number of ranks >= 1, got"):
            algorithms.available(1, size)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="num_elements: expected a number of elements >= 0, got -1"):
        algorithms.available(-1)
    assert all(row.bytes_per_step == 0 for row in algorithms.available(1, 1))


def test_errors_of_combinations_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"topology 'complete': .*; use topology='ring'.*'local_sgd' with this codec"):
        algorithms.get("decentralized", codec="int4")
    with pytest.raises(ValueError, match=r"'identity' is lossless.*leave gather_codec out, or give another lossy"):
        algorithms.get("bytegrad", gather_codec="identity")
    with pytest.raises(ValueError, match="no option 'H'; .*did you mean 'communication_interval'"):
        check_options("local_sgd", {"H": 8})


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
