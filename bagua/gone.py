"""Names of the original that nothing here corresponds to: imports of them go well, use says what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Gone"]


class Gone:
    """Stands for a class or function of the original.

    Args:
        name: as scripts know it.
        instead: what to do; part of a message.
    """

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{self._name} is not offered; {self._instead}")

    def __mro_entries__(self, _: tuple[Any, ...]) -> NoReturn:
        raise TypeError(f"{self._name} cannot be subclassed, it is not offered; {self._instead}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self._name}.{name} is not offered; {self._instead}")

    def __repr__(self) -> str:
        return f"<{self._name} of Bagua 0.9, not offered; {self._instead}>"
