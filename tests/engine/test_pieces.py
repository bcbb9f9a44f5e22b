"""One launch in several parts: what comes before runs once, what comes after runs once, whatever happens between."""

from __future__ import annotations

import threading

import pytest

from bagua.engine.lanes.chunks import InPieces


def in_threads(jobs: list) -> list[BaseException | None]:
    """Run the jobs at once, the last one first, as busy lanes might."""
    errors: list[BaseException | None] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            jobs[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in reversed(range(len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_order(num_parts: int) -> None:
    seen: list[str] = []
    piece = InPieces(num_parts, lambda: seen.append("before"), lambda: seen.append("after"))
    jobs = [piece.wrap(lambda part=part: seen.append(f"part {part}")) for part in range(num_parts)]
    assert in_threads(jobs) == [None] * num_parts
    assert (seen[0], seen[-1]) == ("before", "after")
    assert sorted(seen[1:-1]) == [f"part {part}" for part in range(num_parts)]


def test_nothing_is_exchanged_if_before_says_no() -> None:
    seen: list[str] = []
    piece = InPieces(3, lambda: False, lambda: seen.append("after"))
    assert in_threads([piece.wrap(lambda: seen.append("part")) for _ in range(3)]) == [None] * 3
    assert seen == []


def test_an_error_before_stops_all_parts() -> None:
    def fails() -> None:
        raise ValueError("no")

    seen: list[str] = []
    piece = InPieces(3, fails, lambda: seen.append("after"))
    errors = in_threads([piece.wrap(lambda: seen.append("part")) for _ in range(3)])
    assert [type(error) for error in errors] == [ValueError, type(None), type(None)]
    assert seen == []


def test_an_error_in_a_part_leaves_out_what_comes_after() -> None:
    def fails() -> None:
        raise ValueError("no")

    seen: list[str] = []
    piece = InPieces(2, None, lambda: seen.append("after"))
    errors = in_threads([piece.wrap(fails), piece.wrap(lambda: seen.append("part"))])
    assert isinstance(errors[0], ValueError)
    assert seen == ["part"]
