"""The chart at the top of README: step times on one slow network, torch's own hooks included."""

from __future__ import annotations

from benchmarks.figures.pairs import DILOCO, EDEN, EXACT_SHARE
from benchmarks.figures.results import TORCH, timed
from benchmarks.figures.svg import COLOURS, GREY, INK, Drawing

__all__ = ["CONDITION", "ROWS", "draw_hero"]

CONDITION = "250mbit/0ms"
# What is drawn, and under which name. A row marked "exact warm-up" is the mean of a training that begins with it.
ROWS = (
    ("ddp", "DDP"),
    ("ddp_fp16", "DDP, fp16 hook"),
    ("ddp_bf16", "DDP, bf16 hook"),
    ("ddp_powersgd", "DDP, PowerSGD hook"),
    ("post_local_sgd", "DDP, post-local SGD"),
    ("gradient_allreduce", "gradient_allreduce"),
    ("bytegrad", "bytegrad, 8 bits"),
    ("int4", 'codec="int4"'),
    (EDEN, 'codec="eden:bits=2"'),
    ("power_sgd", "power_sgd, rank 8"),
    ("qadam_1bit", "qadam, 1 bit"),
    ("qadam_1bit exact warm-up", "with 20 % warm-up"),
    (DILOCO, "diloco, every 3 steps"),
)
_WIDTH, _LEFT, _BARS, _ROW, _SIZE = 420, 166, 176, 26, 14  # narrow: a phone shows it whole, and it can still be read


def draw_hero() -> Drawing:
    """One bar for each row, torch's in grey."""
    times = {name: _step_ms(name) for name, _ in ROWS}
    results, more = timed(CONDITION, "ddp"), timed(CONDITION, DILOCO)
    captions = (
        "grey: torch; blue, green: Bagua",
        "x: against the faster of DDP and gradient_allreduce",
        "* may be limited by the 2 shared cores, not the link",
        "qadam: after its exact warm-up; green: 20 % of the steps exact",
        f"{results.num_elements / 1e6:.0f} M fp32 parameters, 300 ms of emulated compute,",
        f"{results.cpu}, {results.date}; eden, diloco: {more.date}",
    )
    height = 46 + _ROW * len(ROWS) + 16 * len(captions) + 12
    drawing = Drawing(_WIDTH, height, "Step time at 250 Mbit/s")
    drawing.text(12, 26, "Step time, 4 hosts, 250 Mbit/s (shorter is better)", bold=True, size=_SIZE)
    scale = _BARS / max(times.values())
    for number, (name, label) in enumerate(ROWS):
        y = 38 + _ROW * number
        entrant = name.split()[0]
        run = timed(CONDITION, entrant)
        colour = GREY if name in TORCH else COLOURS[6] if " " in name else COLOURS[0]
        drawing.text(_LEFT - 10, y + 18, label, "end", _SIZE)
        drawing.box(_LEFT, y + 4, times[name] * scale, 19, colour, round_=2)
        star = "*" if run.limited(CONDITION, entrant) else ""
        words = f"{times[name]:.0f} ms{star}"
        gain = run.reference_ms(CONDITION) / times[name]
        if gain > 1.05:
            words += f", {gain:.1f}x"
        drawing.text(_LEFT + times[name] * scale + 6, y + 18, words, size=_SIZE - 1)
    for number, words in enumerate(captions):
        colour = GREY if number >= len(captions) - 2 else INK
        drawing.text(12, 38 + _ROW * len(ROWS) + 20 + 16 * number, words, size=12, colour=colour)
    return drawing


def _step_ms(name: str) -> float:
    entrant, _, warm = name.partition(" ")
    results = timed(CONDITION, entrant)
    speedup = results.speedup(CONDITION, entrant, EXACT_SHARE if warm else 0.0)
    row = results.row(CONDITION, entrant)
    if speedup is None or row is None:
        raise ValueError(f"{results.name} has no {entrant} at {CONDITION}")
    return results.reference_ms(CONDITION) / speedup if warm else row["step_ms"]
