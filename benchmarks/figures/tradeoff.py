"""Step times beside the physical bound, and time against loss."""

from __future__ import annotations

from benchmarks.figures.axes import Axis, Panel
from benchmarks.figures.pairs import CANDIDATES, differences, exact_share, paired
from benchmarks.figures.results import TORCH, Convergence, Tradeoff
from benchmarks.figures.svg import COLOURS, EDGE, GREY, INK, Drawing

__all__ = ["STEPS", "draw_loss_against_time", "draw_steps", "points_of"]

STEPS = (*TORCH, *CANDIDATES)


def draw_steps(results: Tradeoff) -> Drawing:
    """Bars of step times, one for each condition, with a mark where the bound is."""
    names = [name for name in STEPS if name in results.entrants()]
    row_height = 9 + 11 * len(results.conditions)
    height = 70 + row_height * len(names) + 55
    drawing = Drawing(760, height, "Step times and the physical bound")
    rows = {(c, n): results.row(c, n) or {} for c in results.conditions for n in names}
    longest = max(row["step_ms"] for row in rows.values())
    scale = 450 / longest
    for number, condition in enumerate(results.conditions):
        drawing.box(245 + 130 * number, 18, 12, 12, COLOURS[number])
        drawing.text(263 + 130 * number, 28, condition)
    drawing.line([(245 + 130 * len(results.conditions), 17), (245 + 130 * len(results.conditions), 31)], INK, 2)
    drawing.text(253 + 130 * len(results.conditions), 28, "bound")
    for number, name in enumerate(names):
        top = 46 + row_height * number
        drawing.text(235, top + row_height / 2, f"torch {name}" if name in TORCH else name, "end")
        for part, condition in enumerate(results.conditions):
            row, y = rows[condition, name], top + 11 * part
            drawing.box(245, y, row["step_ms"] * scale, 9, COLOURS[part])
            bound = 245 + row["bound_ms"] * scale
            drawing.line([(bound, y - 1), (bound, y + 10)], INK, 2)
            star = " *" if row["limited"] else ""
            drawing.text(251 + row["step_ms"] * scale, y + 9, f"{row['step_ms']:.0f} ms{star}", size=10)
    drawing.text(16, height - 42, "step time of the slowest rank; conditions are bandwidth / one-way latency", size=11)
    stars = "* limited by the machine, not by the link. qadam, one_bit_lamb and zero_one_adam: after their exact steps."
    drawing.text(16, height - 26, stars, size=11)
    drawing.text(16, height - 10, _caption(results), size=10, colour=GREY)
    return drawing


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
    drawing = Drawing(760, 482 + 14 * len(notes), "Loss against step time")
    x = Axis(f"times as fast as DDP, {results.conditions[-1]}", 0.9, 4.0, (1, 1.5, 2, 3, 4), log=True)
    y = Axis("loss above DDP's, %, same optimizer and steps", -2, 11, range(-2, 12, 2))
    panel = Panel(drawing, 70, 32, 650, 360, x, y, "characters of a text, 160 steps, against step time")
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
    warm = "Optimizers with an exact warm-up: 20 % of the steps in full precision, in the time and in the loss."
    drawing.text(70, 443, warm, size=10, colour=GREY)
    drawing.text(70, 457, "Not drawn, since time and loss were measured with different settings:", size=10, colour=GREY)
    for number, note in enumerate(notes):
        drawing.text(82, 471 + 14 * number, note, size=10, colour=GREY)
    drawing.text(70, 473 + 14 * len(notes), f"{_caption(results)}; loss of {convergence.date}", size=10, colour=GREY)
    return drawing


def _free(x: float, y: float, name: str, taken: list[tuple[float, float, float]]) -> tuple[float, float, str]:
    """A place for a label where no other one is."""
    width = 6.0 * len(name)
    right = x + 8 + width < 730
    start = x + 8 if right else x - 8 - width
    for shift in (4, -12, 18, -26, 32, -40, 46, -54, 60, -68, -82, -96, -110, -124):
        baseline = y + shift
        clear = all(start > end or begin > start + width or abs(line - baseline) >= 12 for begin, end, line in taken)
        if clear and 40 < baseline < 385:
            break
    taken.append((start, start + width, baseline))
    return (x + 8, baseline, "start") if right else (x - 8, baseline, "end")


def _caption(results: Tradeoff) -> str:
    return (
        f"{results.hosts} emulated hosts, {results.num_elements / 1e6:.0f} M fp32 parameters, 300 ms of emulated "
        f"compute, 2 shared cores; {results.date}"
    )
