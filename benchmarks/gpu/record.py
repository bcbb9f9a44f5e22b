"""What one part of a run found: checks and measured rows, kept in a JSON file after each of them."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Record", "Skip"]


class Skip(Exception):
    """Raised within a check that cannot be made here; says why."""


class Record:
    """Checks and rows of one part. A check that fails does not end the part.

    Args:
        part: its name.
        dry: on the CPU, tiny, as far as it goes.
        path: of the JSON file, which is whole after every check; None keeps nothing. A part that is killed at its time
            limit leaves what it has found.
    """

    def __init__(self, part: str, dry: bool, path: Path | None = None) -> None:
        self.part, self.dry, self.path = part, dry, path
        self.checks: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self._begun = time.perf_counter()

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Make one check; what is put into the dictionary is kept with it."""
        entry: dict[str, Any] = {"name": name, "status": "passed", "detail": ""}
        begun = time.perf_counter()
        try:
            yield entry
        except Skip as reason:
            entry.update(status="skipped", detail=str(reason))
        except Exception as error:
            entry.update(status="failed", detail=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        entry["seconds"] = round(time.perf_counter() - begun, 3)
        self.checks.append(entry)
        print(f"  {entry['status']:<7} {name}{': ' + entry['detail'][:300] if entry['detail'] else ''}", flush=True)
        self.save()

    def row(self, **values: Any) -> None:
        """Keep one measurement."""
        self.rows.append(values)
        print("  " + ", ".join(f"{key} {value}" for key, value in values.items()), flush=True)
        self.save()

    @property
    def status(self) -> str:
        """failed if any check has, skipped if none was made, else passed."""
        found = {entry["status"] for entry in self.checks}
        return "failed" if "failed" in found else "passed" if "passed" in found else "skipped"

    def data(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "part": self.part,
            "dry": self.dry,
            "status": self.status,
            "reason": self.reason,
            "seconds": round(time.perf_counter() - self._begun, 1),
            "facts": self.facts,
            "checks": self.checks,
            "rows": self.rows,
        }

    @property
    def reason(self) -> str:
        """What to say beside the status."""
        count = {kind: sum(e["status"] == kind for e in self.checks) for kind in ("passed", "failed", "skipped")}
        text = f"{count['passed']} of {len(self.checks)} checks passed"
        notable = next((e for e in self.checks if e["status"] == "failed"), None)
        notable = notable or next((e for e in self.checks if e["status"] == "skipped"), None)
        return text if notable is None else f"{text}; {notable['name']}: {notable['detail'].splitlines()[0][:160]}"

    def save(self) -> None:
        """Write the file, in one go."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".tmp")
            fresh.write_text(json.dumps(self.data(), indent=1) + "\n")
            fresh.replace(self.path)
