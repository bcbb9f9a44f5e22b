"""Which file of a checkpoint of Accelerate was not written to its end."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

__all__ = ["name_damaged_file"]


def name_damaged_file(directory: Path, error: Exception) -> str | None:
    """Why `error` was raised when `directory` was loaded: the file that is missing or truncated. None: something else.

    safetensors and torch do not name the file that they cannot read, and Accelerate asks for `pytorch_model.bin` if
    `model.safetensors` is missing.
    """
    if isinstance(error, FileNotFoundError):
        missing = Path(str(error.filename))
        usual = missing.name.replace("pytorch_model", "model").replace(".bin", ".safetensors")
        if missing.name.startswith("pytorch_model"):
            return f"{directory} has neither {usual} nor {missing.name}; the save was interrupted or failed"
        return None
    for path in sorted(directory.glob("*.safetensors")) + sorted(directory.glob("*.bin")):
        complete = _ends_where_it_says(path) if path.suffix == ".safetensors" else zipfile.is_zipfile(path)
        if not complete:
            return f"{path} is damaged: it has {path.stat().st_size} bytes, not those of a whole file"
    return None


def _ends_where_it_says(path: Path) -> bool:
    """Whether a file of safetensors has a header and all bytes that this lists."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= path.stat().st_size - 8:
            return False
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
    return path.stat().st_size == 8 + length + max(ends, default=0)
