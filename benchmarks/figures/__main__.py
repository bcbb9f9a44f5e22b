"""Write docs/figures, and the tables in README and docs/ that are made of results, from the newest results.

python -m benchmarks.figures           write what has changed
python -m benchmarks.figures --check   fail if a file is not what it would be
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import bagua
from benchmarks.figures import (
    advice,
    charts,
    convergence,
    curves,
    demo,
    faults,
    hero,
    losses,
    plan,
    suite,
    table,
    tradeoff,
)
from benchmarks.figures.marks import between
from benchmarks.figures.results import RESULTS, Convergence, Tradeoff, all_of, newest
from benchmarks.figures.svg import Drawing

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "figures"


def compared(runs: Convergence) -> list[str]:
    """Return the library's algorithms that are in the results: one that is new has neither figure nor table yet."""
    names = [row.name for row in bagua.algorithms.available(builtin_only=True)]
    return [name for name in names if runs.of_algorithm(name)]


def drawings(times: Tradeoff, runs: Convergence) -> dict[str, Drawing]:
    """Return each figure, by the name of its file."""
    found = {f"convergence-{name}": convergence.draw(runs, name) for name in compared(runs)}
    for path in sorted(RESULTS.glob("*-curves/curves.json"))[-1:]:  # until there is one, there is no such figure
        measured = curves.Curves(path)
        found |= {"bandwidth": curves.draw_bandwidth(measured), "latency": curves.draw_latency(measured)}
    for path in sorted(RESULTS.glob("*-suite/suite.json"))[-1:]:
        learnt = suite.Suite(path)
        found |= {"suite-bytes": suite.draw_bytes(learnt), "suite-time": suite.draw_time(learnt)}
        found["choice"] = charts.draw_choice(learnt)
    return found | {
        "hero": hero.draw_hero(),
        "steps": tradeoff.draw_steps(times),
        "loss-against-time": tradeoff.draw_loss_against_time(times, runs),
        "way": charts.draw_way(),
        "faults": faults.draw_timeline(newest("chaos", "chaos.json")),
        "plan": plan.draw_predictions(newest("plan", "plan.json")),
    }


def figures(times: Tradeoff, runs: Convergence) -> dict[str, str]:
    """Return the text of each figure by file name, for light pages and for dark ones."""
    found = {}
    for name, drawing in drawings(times, runs).items():
        found |= {f"{name}.svg": drawing.render(), f"{name}-dark.svg": drawing.render(dark=True)}
    return found


def documents(times: Tradeoff, runs: Convergence) -> dict[Path, str]:
    """Return the text of each document that has tables of results."""
    tenth = Tradeoff(all_of("bench", "tenth.json")[-1])
    measured = suite.Suite(newest("suite", "suite.json"))
    parts: dict[str, dict[str, str]] = {
        "README.md": {"speed-ups": table.speedups(measured), "advice": advice.advice(measured)},
        "docs/choosing.md": {"advice": advice.advice(measured, with_reasons=True)},
        "docs/performance.md": {
            "speed-ups": table.speedups(measured),
            "step times": table.grid(times),
            "step times, a tenth": table.grid(tenth),
            "warm-up": table.warm_up(times),
            "demo": demo.rows(newest("demo", "demo.json")),
        },
        "docs/planning.md": {"predictions": plan.rows(newest("plan", "plan.json"))},
        "docs/fault-measurements.md": {
            "faults": faults.rows(newest("faults", "faults.json")),
            "starts": faults.starts(newest("preload", "faults.json")),
            "chaos": faults.chaos_rows(newest("chaos", "chaos.json")),
            "200 faults": faults.chaos_rows(*(newest("hundreds", f"{name}.json") for name in ("chaos", "more"))),
        },
        "docs/algorithms.md": {losses.NAME: losses.misses(runs)},
    }
    parts |= {f"docs/algorithms/{name}.md": {losses.NAME: losses.of_algorithm(runs, name)} for name in compared(runs)}
    for path in sorted(RESULTS.glob("*-suite/suite.json"))[-1:]:
        learnt = suite.Suite(path)
        parts["docs/convergence.md"] = {
            suite.EQUAL_STEPS: suite.equal_steps(learnt),
            suite.BYTES_AND_TIME: suite.bytes_and_time(learnt),
            suite.MISSES: suite.misses(learnt),
            suite.TARGETS: suite.targets(learnt),
        }
    every_run = [Convergence(path) for path in all_of("convergence", "results.json")]
    parts["docs/algorithms/async.md"]["runs"] = losses.of_runs(every_run, "async")
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
