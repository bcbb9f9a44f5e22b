"""Results in a file: JSON, one entry for each model, algorithm and set of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bagua.autotune.settings import Settings

__all__ = ["load", "save"]

_VERSION = 1
_MOST_BYTES = 10 * 2**20


def load(path: str, key: str) -> Settings | None:
    """Return what was saved under `key`, None if nothing was or there is no such file.

    Raises:
        ValueError: the file holds something else.
    """
    entry = _read(Path(path)).get(key)
    if entry is None:
        return None
    try:
        return Settings.from_json(entry["settings"] if isinstance(entry, dict) else entry)
    except (KeyError, ValueError) as error:
        raise ValueError(f"autotune: file {path!r}, entry {key!r}: {error}") from None


def save(path: str, key: str, settings: Settings, facts: dict[str, Any]) -> None:
    """Add an entry, or put it in the place of an older one. The file is there as a whole or not at all.

    Args:
        facts: for people: step times, dates.

    Raises:
        ValueError: the file holds something else.
        OSError: it cannot be written.
    """
    target = Path(path)
    results = {**_read(target), key: {**facts, "settings": settings.as_json()}}
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    part.write_text(json.dumps({"version": _VERSION, "results": results}, indent=2) + "\n")
    part.replace(target)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"autotune: file {str(path)!r} cannot be read: {error}") from error
    if len(data) > _MOST_BYTES:
        raise ValueError(
            f"autotune: file {str(path)!r} is larger than {_MOST_BYTES} bytes, too large for a file of "
            "autotuning results"
        )
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"autotune: file {str(path)!r} is not valid JSON: {error}") from None
    good = isinstance(content, dict) and content.get("version") == _VERSION and isinstance(content.get("results"), dict)
    if not good:
        raise ValueError(f"autotune: file {str(path)!r} does not hold autotuning results of version {_VERSION}")
    return content["results"]
