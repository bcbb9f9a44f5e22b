"""Load and run examples/squad, whose modules are in no package."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from tests.examples.scripts import ROOT

FOLDER = ROOT / "examples" / "squad"


def load(name: str) -> Any:
    """Import a module of the example."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def run_script(words: list[str]) -> dict[str, float]:
    """On a rank."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("main").main(words)
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("main", None)  # a name that others use


def squad_text(answer: str, start_at: int, impossible: bool = False) -> str:
    entry = {"id": "1", "question": "?", "answers": [{"text": answer, "answer_start": start_at}]}
    entry |= {"is_impossible": impossible}
    return json.dumps({"data": [{"paragraphs": [{"context": "an old dog", "qas": [entry]}]}]})
