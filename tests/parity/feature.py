"""Rows of the matrix: what a feature is, and what can come of it."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from tests.parity.case import Case, case_of

MODULES = (
    "accumulation",
    "parameters",
    "loop",
    "precision",
    "statistics",
    "embeddings",
    "uneven",
    "compiled",
    "lifecycle",
    "experts",
)


def says(error_type: type[Exception], *words: str, run: Callable[[], object]) -> str:
    """The message that `run` fails with; an AssertionError if it does not, or if a word is missing."""
    try:
        run()
    except error_type as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise AssertionError(f"{error} lacks {missing}") from error
        return str(error)
    raise AssertionError(f"no {error_type.__name__}")


class Refused(Exception):
    """The library said no, clearly; the text is what it said."""


class NotApplicable(Exception):
    """The question does not arise; the text says why."""


class Cell(NamedTuple):
    """What came of one feature with one algorithm: kind is "yes", "refused", "not applicable" or "failed"."""

    kind: str
    remark: str


@dataclass(frozen=True)
class Feature:
    """One row.

    Attributes:
        section: heading in the page.
        title: what works, in the words of a user.
        run: on every rank; returns a remark for the page or None, or raises.
        refused, not_applicable: where that is expected; a pattern of the message by algorithm.
        daily: algorithms with which it is tried every day; None for all.
    """

    name: str
    section: str
    title: str
    run: Callable[[Case], str | None]
    refused: dict[str, str]
    not_applicable: dict[str, str]
    daily: Collection[str] | None

    def problem(self, algorithm: str, cell: Cell) -> str:
        """Why `cell` is not as it should be, or ""."""
        for kind, expected in (("refused", self.refused), ("not applicable", self.not_applicable)):
            if algorithm in expected:
                found = cell.kind == kind and re.search(expected[algorithm], cell.remark)
                return "" if found else f"expected: {kind}, {expected[algorithm]!r}; got: {cell.kind}, {cell.remark}"
        return "" if cell.kind == "yes" else f"{cell.kind}: {cell.remark}"


FEATURES: dict[str, Feature] = {}


def feature(
    section: str,
    title: str,
    refused: dict[str, str] | None = None,
    not_applicable: dict[str, str] | None = None,
    daily: Collection[str] | None = None,
) -> Callable[[Callable[[Case], str | None]], Callable[[Case], str | None]]:
    """Add a row."""

    def add(run: Callable[[Case], str | None]) -> Callable[[Case], str | None]:
        name = run.__name__
        assert name not in FEATURES, name
        FEATURES[name] = Feature(name, section, title, run, refused or {}, not_applicable or {}, daily)
        return run

    return add


def load() -> dict[str, Feature]:
    """All rows, in the order of the page."""
    for module in MODULES:
        importlib.import_module(f"tests.parity.{module}")
    return FEATURES


def run_features(algorithm: str, names: list[str]) -> dict[str, Cell]:
    """On a rank: try the features in turn; up to the first that fails, since ranks may be out of step after it."""
    features, case, found = load(), case_of(algorithm), {}
    for name in names:
        try:
            found[name] = Cell("yes", features[name].run(case) or "")
        except Refused as error:
            found[name] = Cell("refused", str(error))
        except NotApplicable as error:
            found[name] = Cell("not applicable", str(error))
        except Exception:
            found[name] = Cell("failed", traceback.format_exc())
            break
    return found
