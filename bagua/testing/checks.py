"""Run named checks, and say in the error which one failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["require", "run_checks"]


def require(condition: object, message: str) -> None:
    """Raise AssertionError with `message` unless `condition` is true. Works under `python -O` too."""
    if not condition:
        raise AssertionError(message)


def run_checks(
    what: str, checks: Mapping[str, Callable[..., None]], subject: Any, only: Collection[str], skip: Collection[str]
) -> None:
    """Call the chosen checks with `subject`.

    Args:
        what: the subject, for messages.
        checks: by name.
        subject: argument of each check.
        only: names of the checks to run; empty: all.
        skip: names of checks to leave out.

    Raises:
        ValueError: `only` or `skip` names no check.
        AssertionError: a check failed or raised; the message names the subject and the check.
    """
    for argument, names in (("only", only), ("skip", skip)):
        unknown = [name for name in names if name not in checks]
        if isinstance(names, str) or unknown:
            raise ValueError(f"{argument}: expected names of checks ({', '.join(checks)}), got {names!r}")
    for name, check in checks.items():
        if (only and name not in only) or name in skip:
            continue
        try:
            check(subject)
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"{what}, check {name!r}: {kind}{error}") from error
