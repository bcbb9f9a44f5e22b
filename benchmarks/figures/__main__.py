"""Write docs/figures, and the tables in README and docs/ that are made of results, from the newest results.

python -m benchmarks.figures           write what has changed
python -m benchmarks.figures --check   fail if a file is not what it would be
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from bagua.algorithms import available
from benchmarks.figures import charts, convergence, losses, table, tradeoff
from benchmarks.figures.marks import between
from benchmarks.figures.results import Convergence, Tradeoff, all_of, newest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "figures"


def figures(times: Tradeoff, runs: Convergence) -> dict[str, str]:
    """Return the text of each figure, by file name."""
    found = {f"convergence-{row.name}.svg": convergence.draw(runs, row.name) for row in available()}
    return found | {
        "steps.svg": tradeoff.draw_steps(times),
        "loss-against-time.svg": tradeoff.draw_loss_against_time(times, runs),
        "choice.svg": charts.draw_choice(times, runs),
        "way.svg": charts.draw_way(),
    }


def documents(times: Tradeoff, runs: Convergence) -> dict[Path, str]:
    """Return the text of each document that has tables of results."""
    parts: dict[str, Mapping[str, str]] = {
        "README.md": {table.NAME: table.in_short(times)},
        "docs/performance.md": {table.NAME: table.in_full(times)},
        "docs/algorithms.md": {losses.NAME: losses.misses(runs)},
    }
    parts |= {f"docs/algorithms/{r.name}.md": {losses.NAME: losses.of_algorithm(runs, r.name)} for r in available()}
    every_run = [Convergence(path) for path in all_of("convergence", "results.json")]
    page = "docs/algorithms/async.md"
    parts[page] = {**parts[page], "runs": losses.of_runs(every_run, "async")}
    made = {}
    for name, named in parts.items():
        text = (ROOT / name).read_text()
        for mark, part in named.items():
            text = between(text, mark, part)
        made[ROOT / name] = text
    return made


def main(argv: list[str] | None = None) -> int:
    """Write or check; return the exit code."""
    parser = argparse.ArgumentParser(description="The figures and tables of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    times, runs = Tradeoff(newest("bench", "tradeoff.json")), Convergence(newest("convergence", "results.json"))
    made = {FOLDER / name: text for name, text in figures(times, runs).items()} | documents(times, runs)
    differ = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for path in differ:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[path])
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        print(f"{name}: {'not up to date' if check else 'written'}")
    return int(check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
