"""A registry of specification classes: frozen dataclasses that users choose by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

__all__ = ["Registry"]

T = TypeVar("T")
C = TypeVar("C")


# What an option annotated with a plain type takes; where another type is named, the class itself has to check.
_PLAIN: dict[str, Callable[[Any], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, Real) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
}


class Registry(Generic[T]):
    """Classes derived from one base, by their class variable `name`; `in`, iteration and `[name]` work.

    Args:
        noun: what an entry is, for messages: "algorithm".
        base: the class that every entry derives from.
        called: what others call an entry, with what to write here, for messages: {"ddp": "'gradient_allreduce'"}.
    """

    def __init__(self, noun: str, base: type[T], called: Mapping[str, str] | None = None) -> None:
        self.noun = noun
        self._base = base
        self._called = dict(called or {})
        self._classes: dict[str, type[T]] = {}

    def register(self, cls: C, *, replace: bool = False) -> C:
        """Make `cls` known under its `name`; usable as a decorator.

        Registering the same class again, also after its module was reloaded, is allowed.

        Args:
            cls: a subclass of the base.
            replace: take the name from another class.

        Returns:
            `cls`.

        Raises:
            TypeError: not a subclass of the base, or not a dataclass.
            ValueError: it has no name, or the name is taken by another class.

        Examples:
            >>> from dataclasses import dataclass
            >>> @bagua.algorithms.register
            ... @dataclass(frozen=True)
            ... class Doubled(bagua.algorithms.ByteGrad):
            ...     name = "doubled"
            ...     average: bool = False
            >>> bagua.algorithms.get("doubled").average
            False
        """
        if not (isinstance(cls, type) and issubclass(cls, self._base)):
            raise TypeError(f"register: expected a subclass of {self._base.__name__}, got {cls!r}")
        name = getattr(cls, "name", "")
        if not isinstance(name, str) or not name:
            raise ValueError(f"register: {cls.__qualname__} has no `name`")
        if not is_dataclass(cls):
            raise TypeError(
                f"register: {cls.__qualname__} is not a dataclass; decorate it with @dataclass(frozen=True)"
            )
        known = self._classes.get(name)
        same = known is None or (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
        if not same and not replace:
            assert known is not None
            raise ValueError(f"{self.noun} {name!r} is already registered as {known.__module__}.{known.__qualname__}")
        self._classes[name] = cls
        return cls  # pyright: ignore[reportReturnType]

    def unregister(self, name: str) -> None:
        """Forget an entry.

        Raises:
            ValueError: the name is unknown.
        """
        self._find(name)
        del self._classes[name]

    def get(self, name_or_instance: str | T, /, **options: Any) -> T:
        """Return the entry of that name made with `options`, or the instance itself.

        Raises:
            TypeError: neither a name nor an instance.
            ValueError: the name or an option is unknown, an option has a wrong value, or options were given beside an
                instance.

        Examples:
            >>> bagua.algorithms.get("bytegrad", average=False).average
            False
            >>> bagua.topologies.get("ring")
            Ring()
        """
        if isinstance(name_or_instance, self._base):
            if options:
                names = ", ".join(options)
                raise ValueError(
                    f"{self.noun}: got an instance and options {names}; pass the options to {name_or_instance!r} itself"
                )
            return name_or_instance
        cls = self._find(name_or_instance)
        known = {field.name: field for field in fields(cls) if field.init}  # pyright: ignore[reportArgumentType]
        for option, value in options.items():
            where = f"{self.noun} {cls.name!r}"  # pyright: ignore[reportAttributeAccessIssue]
            if option not in known:
                raise ValueError(f"{where} has no option {option!r}; it has: {', '.join(known) or 'none'}")
            wanted = _names_of_types(known[option].type)
            if wanted <= _PLAIN.keys() and not any(_PLAIN[name](value) for name in wanted):
                kinds = " or ".join(sorted(wanted, key=lambda name: (name == "None", name)))
                article = "an" if kinds[0] == "i" else "a"
                raise ValueError(f"{where}, option {option!r}: expected {article} {kinds}, got {value!r}")
        return cls(**options)

    def builtin(self) -> tuple[str, ...]:
        """The names of the library's own entries: those defined in the package of the base, in order."""
        package = self._base.__module__.rpartition(".")[0] + "."
        return tuple(name for name, cls in self._classes.items() if cls.__module__.startswith(package))

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __getitem__(self, name: str) -> type[T]:
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def _find(self, name: object) -> type[T]:
        if not isinstance(name, str):
            article = "an" if self._base.__name__[0] in "AEIOU" else "a"
            got = type(name).__name__
            if isinstance(name, type) and issubclass(name, self._base):
                own = getattr(name, "name", "")
                got = f"the class {name.__name__}; pass {name.__name__}()" + (f" or {own!r}" if own in self else "")
            raise TypeError(f"{self.noun}: expected a name or {article} {self._base.__name__}, got {got}")
        if name not in self._classes:
            raise ValueError(self.unknown(name))
        return self._classes[name]

    def unknown(self, name: str, *more: str) -> str:
        """The message about a name that is not registered, with the one that may be meant.

        Args:
            name: not registered.
            more: further names that the caller takes.
        """
        known = [*more, *self._classes]
        meant = self._called.get(name.lower())
        if meant is None:
            plain = {each.replace("_", ""): each for each in known}  # "powersgd", "Power-SGD"
            close = get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, n=1, cutoff=0.75)
            meant = repr(plain[close[0]]) if close else ""
        hint = f"did you mean {meant}? " if meant else ""
        return f"{self.noun} {name!r} is unknown; {hint}available: {', '.join(known)}"


def _names_of_types(annotation: Any) -> set[str]:
    """The parts of an annotation such as `int | None`, a string or not."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return {part.strip(" '\"") for part in text.split("|")}
