"""Write docs/figures, and the table in README, from the newest results.

python -m benchmarks.figures           write what has changed
python -m benchmarks.figures --check   fail if a file is not what it would be
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bagua.algorithms import available
from benchmarks.figures import charts, convergence, tradeoff
from benchmarks.figures.results import Convergence, Tradeoff, newest
from benchmarks.figures.table import with_table

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
README = FOLDER.parents[1] / "README.md"


def figures() -> dict[str, str]:
    """Return the text of each figure, by file name."""
    losses = Convergence(newest("convergence", "results.json"))
    times = Tradeoff(newest("bench", "tradeoff.json"))
    found = {f"convergence-{row.name}.svg": convergence.draw(losses, row.name) for row in available()}
    return found | {
        "steps.svg": tradeoff.draw_steps(times),
        "loss-against-time.svg": tradeoff.draw_loss_against_time(times, losses),
        "choice.svg": charts.draw_choice(times, losses),
        "way.svg": charts.draw_way(),
    }


def main(argv: list[str] | None = None) -> int:
    """Write or check; return the exit code."""
    parser = argparse.ArgumentParser(description="The figures of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    made = figures()
    differ = [
        name for name, text in made.items() if not (FOLDER / name).exists() or (FOLDER / name).read_text() != text
    ]
    if not check:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name in differ:
            (FOLDER / name).write_text(made[name])
    text = README.read_text()
    renewed = with_table(text, Tradeoff(newest("bench", "tradeoff.json")))
    if renewed != text and not check:
        README.write_text(renewed)
    differ = [f"docs/figures/{name}" for name in differ] + ["README.md"] * (renewed != text)
    for name in differ:
        print(f"{name}: {'not up to date' if check else 'written'}")
    return int(check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
