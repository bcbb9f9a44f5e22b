"""The map of the original's test files is complete on our side."""

from __future__ import annotations

from pathlib import Path

from tests.original import LEFT_OUT, SOURCES

_TESTS = Path(__file__).parent.parent


def test_every_file_of_the_original_has_one_of_ours() -> None:
    named = {name for names in SOURCES.values() for name in names}
    assert not [name for name in named if not (_TESTS / name).is_file()]
    ours = {f"original/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert ours - named == {"original/test_sources.py", "original/test_amp.py", "original/test_new_algorithm.py"}
    assert all(entry.split(":")[0] in SOURCES for entry in LEFT_OUT)
