"""Step times beside the physical bound, and time against loss."""

from __future__ import annotations

from benchmarks.figures.axes import Axis, Panel
from benchmarks.figures.results import Convergence, Tradeoff
from benchmarks.figures.svg import COLOURS, GREY, Drawing

__all__ = ["CONFIGURATION", "STEPS", "draw_loss_against_time", "draw_steps"]

# The entrant of `bagua bench` and the row of the convergence benchmark that mean the same exchange.
CONFIGURATION = {
    "gradient_allreduce": "gradient_allreduce",
    "gradient_allreduce_bf16": "gradient_allreduce bf16",
    "bytegrad": "bytegrad",
    "int4": "bytegrad int4 + feedback",
    "qadam": "qadam",
    "qadam_1bit": "qadam sign",
    "one_bit_lamb": "one_bit_lamb",
    "zero_one_adam": "zero_one_adam",
    "power_sgd": "power_sgd",
    "decentralized": "decentralized all",
    "decentralized_shift_one": "decentralized shift_one",
    "low_precision_decentralized": "low_precision_decentralized",
    "low_precision_decentralized_overlap": "low_precision overlapped",
    "async": "async",
    "local_sgd": "local_sgd",
}
# The same algorithm with other intervals: a round takes `bagua bench` as long as 64 steps do, and is hidden; the
# convergence benchmark has 160 steps in all, so a round every 16.
UNLIKE = {"diloco": ("diloco", "step time with a round every 64 steps, loss with one every 16")}
STEPS = (
    "ddp", "ddp_fp16", "ddp_powersgd", "post_local_sgd", *CONFIGURATION, "diloco",
)  # fmt: skip


def draw_steps(results: Tradeoff) -> str:
    """Bars of step times, one for each condition, with a mark where the bound is."""
    names = [name for name in STEPS if name in results.entrants()]
    row_height = 9 + 11 * len(results.conditions)
    height = 70 + row_height * len(names) + 40
    drawing = Drawing(760, height, "Step times beside the bound")
    rows = {(c, n): results.row(c, n) or {} for c in results.conditions for n in names}
    longest = max(row["step_ms"] for row in rows.values())
    scale = 460 / longest
    for number, condition in enumerate(results.conditions):
        drawing.box(245 + 130 * number, 18, 12, 12, COLOURS[number])
        drawing.text(263 + 130 * number, 28, condition)
    drawing.line([(245 + 130 * len(results.conditions), 17), (245 + 130 * len(results.conditions), 31)], "#000000", 2)
    drawing.text(253 + 130 * len(results.conditions), 28, "bound")
    for number, name in enumerate(names):
        top = 46 + row_height * number
        drawing.text(235, top + row_height / 2, name, "end")
        for part, condition in enumerate(results.conditions):
            row, y = rows[condition, name], top + 11 * part
            drawing.box(245, y, row["step_ms"] * scale, 9, COLOURS[part])
            bound = 245 + row["bound_ms"] * scale
            drawing.line([(bound, y - 1), (bound, y + 10)], "#000000", 2)
            drawing.text(251 + row["step_ms"] * scale, y + 9, f"{row['step_ms']:.0f} ms", size=10)
    drawing.text(245, height - 26, "step time of the slowest rank; conditions are bandwidth / one-way latency", size=11)
    drawing.text(245, height - 10, _caption(results), size=10, colour=GREY)
    return drawing.render()


def draw_loss_against_time(results: Tradeoff, convergence: Convergence) -> str:
    """A point for each algorithm: how much faster a step is than DDP's, and how much is lost."""
    condition = results.conditions[-1]
    drawing = Drawing(760, 470, "What a faster step costs")
    x = Axis(f"times as fast as DDP, {condition}", 0.9, 5.0, (1, 1.5, 2, 3, 4, 5), log=True)
    y = Axis("loss above DDP's, %, same optimizer and steps", -2, 11, range(-2, 12, 2))
    panel = Panel(drawing, 70, 32, 650, 360, x, y, "characters of a text, 160 steps, against step time")
    points = []
    same = CONFIGURATION | {entrant: name for entrant, (name, _) in UNLIKE.items()}
    for entrant, name in same.items():
        speedup, behind = results.speedup(condition, entrant), convergence.row("char_lm", name)["difference"]
        if speedup is not None and behind is not None:
            points.append((*panel.place(speedup, behind), entrant))
    taken = [(at_x - 5, at_x + 5, at_y + 4) for at_x, at_y, _ in points]
    for number, (at_x, at_y, name) in enumerate(sorted(points)):
        colour = COLOURS[number % len(COLOURS)]
        drawing.dot(at_x, at_y, colour, hollow=name in UNLIKE)
        taken.remove((at_x - 5, at_x + 5, at_y + 4))
        label_x, label_y, anchor = _free(at_x, at_y, name, taken)
        taken.append((at_x - 5, at_x + 5, at_y + 4))
        if abs(label_y - at_y) > 14:
            drawing.line([(at_x, at_y), (label_x, label_y - 4)], "#bbbbbb", 0.8)
        drawing.text(label_x, label_y, name, anchor, 11, colour)
    hollow = "; ".join(f"hollow: {name}, {how}" for name, (_, how) in UNLIKE.items())
    drawing.text(70, 441, hollow, size=10, colour=GREY)
    drawing.text(70, 455, f"{_caption(results)}; loss of {convergence.date}", size=10, colour=GREY)
    return drawing.render()


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
        f"{results.hosts} emulated hosts, {results.num_elements / 1e6:.0f} M fp32 elements, 300 ms of emulated "
        f"compute, 2 shared cores; {results.date}"
    )
