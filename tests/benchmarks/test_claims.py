"""A section of the documentation that states a measured ratio or time names its result file or its command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_CLAIM = re.compile(
    r"(?<![\w.])\d+(?:[.,]\d+)*x\b"  # 2.5x
    r"|\d (?:ns|µs|ms)\b"  # 12 ms
    r"|\b(?:\d[\d.,]*|two|three|four|five|ten) times (?:as fast|as slow|faster|slower|longer)"
)
_SOURCE = re.compile(
    r"benchmarks/results/|\d{4}-\d\d-\d\d-[a-z]+/"  # a file or folder of results
    r"|python -m benchmarks\.|python examples/|bagua bench|bagua_sys_perf|make (?:bench|gpu|demo)"  # a command
    r"|\bperformance\.md"  # the page that names both
)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
# Sections whose times are constants of the code or of an emulated network, not measurements.
CONSTANTS = {
    ("docs/bagua-net.md", "Behaviour and limits"),
    ("docs/cached-dataset.md", "lmdb"),
    ("docs/cached-dataset.md", "With the DataLoader"),
    ("docs/design/0003-bagua-net.md", "Decisions"),
    ("docs/lab.md", "In Python"),
    ("docs/lab.md", "What is emulated, and what is not"),
    ("docs/performance.md", "Method"),
}


def unsupported(text: str, opening_counts: bool = False) -> dict[str, list[str]]:
    """Claims without a source, by the heading of their section: all from one heading to the next.

    Args:
        opening_counts: a source above the first `##` holds for the whole page, as in the design notes.
    """
    sections = re.split(r"^(?=#{1,6} )", _FENCE.sub("", text), flags=re.MULTILINE)
    if opening_counts and _SOURCE.search(text.split("\n## ", 1)[0]):
        return {}
    found = {
        section.split("\n", 1)[0].lstrip("# "): _CLAIM.findall(_CODE.sub("", section))
        for section in sections
        if not _SOURCE.search(section)
    }
    return {heading: claims for heading, claims in found.items() if claims}


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_claims_name_their_source(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    found = unsupported(page.read_text(), opening_counts=page.parent.name == "design")
    without = {heading: claims for heading, claims in found.items() if (name, heading) not in CONSTANTS}
    assert not without, f"{name}: name the result file or the command (CONTRIBUTING.md, A number): {without}"


@pytest.mark.docs
def test_exceptions_are_still_needed() -> None:
    for name, heading in CONSTANTS:
        found = unsupported((ROOT / name).read_text(), opening_counts="/design/" in name)
        assert heading in found, f"{name}: {heading}"


@pytest.mark.parametrize("claim", ["2.5x at 1 Gbit/s", "| 1.00x |", "took 426 ms", "2.4 µs each", "3 times as fast"])
def test_a_claim_without_a_source_is_found(claim: str) -> None:
    page = f"# Page\n\nFrom `bagua bench`.\n\n## Speed\n\n{claim}\n"
    assert list(unsupported(page)) == ["Speed"]
    assert not unsupported(page, opening_counts=True)
    assert not unsupported(page + "\nMeasured with `python -m benchmarks.overhead`.\n")


@pytest.mark.parametrize("text", ["`--latency 5ms` and `12 ms`", "8x8 blocks of int4x2", "```\n2.5x\n```"])
def test_code_makes_no_claim(text: str) -> None:
    assert not unsupported(f"# Page\n\n{text}\n")
