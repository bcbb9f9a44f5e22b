"""Step times beside the physical bound, and time against loss."""

from __future__ import annotations

from benchmarks.figures.axes import Axis, Panel
from benchmarks.figures.pairs import CANDIDATES, differences, exact_share, paired
from benchmarks.figures.results import TORCH, Convergence, Tradeoff
from benchmarks.figures.svg import COLOURS, EDGE, GREY, INK, Drawing

__all__ = ["STEPS", "draw_loss_against_time", "draw_steps", "points_of"]

STEPS = (*TORCH, *CANDIDATES)
_WIDTH = 480  # on a phone, letters of 12 are 9 pixels high


def draw_steps(results: Tradeoff) -> Drawing:
    """Bars of step times, one for each condition, with a mark where the bound is."""
    names = [name for name in STEPS if name in results.entrants()]
    row_height = 9 + 12 * len(results.conditions)
    height = 50 + row_height * len(names) + 75
    drawing = Drawing(_WIDTH, height, "Step times and the physical bound")
    rows = {(c, n): results.row(c, n) or {} for c in results.conditions for n in names}
    longest = max(row["step_ms"] for row in rows.values())
    left, scale = 216, 198 / longest
    for number, condition in enumerate(results.conditions):
        drawing.box(left + 90 * number, 18, 12, 12, COLOURS[number])
        drawing.text(left + 16 + 90 * number, 28, condition)
    at = left + 90 * len(results.conditions)
    drawing.line([(at, 17), (at, 31)], INK, 2)
    drawing.text(at + 6, 28, "bound")
    for number, name in enumerate(names):
        top = 46 + row_height * number
        drawing.text(left - 8, top + row_height / 2, _called(name), "end")
        for part, condition in enumerate(results.conditions):
            row, y = rows[condition, name], top + 12 * part
            drawing.box(left, y, row["step_ms"] * scale, 10, COLOURS[part])
            bound = left + row["bound_ms"] * scale
            drawing.line([(bound, y - 1), (bound, y + 11)], INK, 2)
            star = " *" if row["limited"] else ""
            drawing.text(left + 6 + row["step_ms"] * scale, y + 9, f"{row['step_ms']:.0f} ms{star}", size=11)
    captions = (
        "step time of the slowest rank; conditions are bandwidth / one-way latency",
        "* limited by the machine, not by the link",
        "qadam, one_bit_lamb and zero_one_adam: after their exact steps",
        *_caption(results),
    )
    for number, words in enumerate(captions):
        drawing.text(12, height - 70 + 15 * number, words, size=11, colour=INK if number < 3 else GREY)
    return drawing


def _called(name: str) -> str:
    return f"torch {name}" if name in TORCH else name.replace("low_precision_decentralized_overlap", "... overlap")


def points_of(results: Tradeoff, convergence: Convergence) -> dict[str, tuple[float, float]]:
    """Return, for each entrant timed and trained with the same settings, its speed-up and how far its loss is behind.

    The speed-up counts the exact warm-up that the training had.
    """
    condition, found = results.conditions[-1], {}
    for entrant, name in paired(results, convergence).items():
        speedup = results.speedup(condition, entrant, exact_share(entrant))
        behind = convergence.row("char_lm", name)["difference"]
        if speedup is not None and behind is not None:
            found[entrant] = (speedup, behind)
    return found


def draw_loss_against_time(results: Tradeoff, convergence: Convergence) -> Drawing:
    """A point for each algorithm: how much faster a step is than DDP's, and how much is lost."""
    left_out = {name: differences(name, row, results, convergence) for name, row in CANDIDATES.items()}
    notes = [f"{name}: {' and '.join(why[:1])}" for name, why in left_out.items() if why]
    captions = [
        "Optimizers with an exact warm-up: 20 % of the steps in full precision,",
        "in the time and in the loss.",
        "Not drawn, since time and loss were measured with different settings:",
        *(f"- {note}" for note in notes),
        *_caption(results),
        f"loss of {convergence.date}",
    ]
    drawing = Drawing(_WIDTH, 430 + 14 * len(captions), "Loss against step time")
    x = Axis(f"times as fast as DDP, {results.conditions[-1]}", 0.9, 4.0, (1, 1.5, 2, 3, 4), log=True)
    y = Axis("loss above DDP's, %, same optimizer and steps", -2, 11, range(-2, 12, 2))
    panel = Panel(drawing, 54, 32, _WIDTH - 70, 340, x, y, "characters of a text, 160 steps, against step time")
    points = [(*panel.place(*at), entrant) for entrant, at in points_of(results, convergence).items()]
    taken = [(at_x - 5, at_x + 5, at_y + 4) for at_x, at_y, _ in points]
    for number, (at_x, at_y, name) in enumerate(sorted(points)):
        colour = COLOURS[number % len(COLOURS)]
        drawing.dot(at_x, at_y, colour)
        taken.remove((at_x - 5, at_x + 5, at_y + 4))
        label_x, label_y, anchor = _free(at_x, at_y, name, taken)
        taken.append((at_x - 5, at_x + 5, at_y + 4))
        if abs(label_y - at_y) > 14:
            drawing.line([(at_x, at_y), (label_x, label_y - 4)], EDGE, 0.8)
        drawing.text(label_x, label_y, name, anchor, 11, colour)
    for number, words in enumerate(captions):
        drawing.text(12, 424 + 14 * number, words, size=11, colour=GREY)
    return drawing


def _free(x: float, y: float, name: str, taken: list[tuple[float, float, float]]) -> tuple[float, float, str]:
    """A place for a label where no other one is."""
    width = 6.5 * len(name)
    right = x + 8 + width < _WIDTH - 10
    start = x + 8 if right else x - 8 - width
    for shift in (4, -12, 18, -26, 32, -40, 46, -54, 60, -68, -82, -96, -110, -124):
        baseline = y + shift
        clear = all(start > end or begin > start + width or abs(line - baseline) >= 12 for begin, end, line in taken)
        if clear and 40 < baseline < 365:
            break
    taken.append((start, start + width, baseline))
    return (x + 8, baseline, "start") if right else (x - 8, baseline, "end")


def _caption(results: Tradeoff) -> tuple[str, str]:
    return (
        f"{results.hosts} emulated hosts, {results.num_elements / 1e6:.0f} M fp32 parameters,",
        f"300 ms of emulated compute, 2 shared cores; {results.date}",
    )
