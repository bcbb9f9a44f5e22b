"""Charts of boxes: which algorithm to choose, and which way a gradient goes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures.pairs import CANDIDATES, exact_share, paired
from benchmarks.figures.results import Convergence, Tradeoff
from benchmarks.figures.svg import ANSWER, EDGE, GREY, QUESTION, Drawing, percent

__all__ = ["draw_choice", "draw_way"]


def _box(drawing: Drawing, x: float, y: float, width: float, height: float, lines: Sequence[str], fill: str) -> None:
    drawing.box(x, y, width, height, fill, EDGE, 6)
    drawing.lines_of_text(x + width / 2, y + height / 2, lines, size=11)


def draw_choice(results: Tradeoff, convergence: Convergence) -> Drawing:
    """Questions, and for each answer what was measured."""

    condition, same = results.conditions[-1], paired(results, convergence)

    def measured(entrant: str) -> str:
        speedup = results.speedup(condition, entrant, exact_share(entrant))
        loss = "loss not measured"
        if entrant in same:
            loss = f"loss {percent(convergence.row('char_lm', CANDIDATES[entrant])['difference'])}"
        return (f"{speedup:.1f} x DDP, " if speedup else "") + loss

    drawing = Drawing(760, 650, "Choosing an algorithm")
    _box(drawing, 16, 16, 400, 46, ["*Train with gradient_allreduce.",
         "Is exposed_s (bagua.stats) a large part of the step?"], QUESTION)  # fmt: skip
    _box(drawing, 500, 16, 244, 46, ["*stay with gradient_allreduce", "nothing to gain; it is exact"], ANSWER)
    drawing.arrow([(416, 39), (500, 39)])
    drawing.text(448, 34, "no")
    drawing.arrow([(216, 62), (216, 98)])
    drawing.text(224, 85, "yes")
    _box(drawing, 16, 98, 400, 46, ["*Must all ranks hold the same weights after each step?",
         "(for example, to evaluate on any rank)"], QUESTION)  # fmt: skip
    drawing.arrow([(216, 144), (216, 190)])
    drawing.text(224, 172, "yes")
    drawing.arrow([(416, 121), (588, 121), (588, 190)])
    drawing.text(424, 116, "no, averages suffice")

    left = [
        (["start with"], ["*bytegrad", measured("bytegrad")]),
        (["still waiting"], ["*gradient_allreduce", 'codec="int4"', measured("int4")]),
        (["large matrices"], ["*power_sgd", measured("power_sgd")]),
        (["Adam"], ["*qadam", measured("qadam")]),
        (["Adam,", "thousands of steps"], ["*qadam", 'codec="sign"', measured("qadam_1bit")]),
        (["LAMB,", "large batches"], ["*one_bit_lamb", measured("one_bit_lamb")]),
    ]
    right = [
        (["some ranks", "are slow"], ["*async", measured("async")]),
        (["latency is high"], ["*decentralized", 'peer_selection_mode="shift_one"',
                               measured("decentralized_shift_one")]),
        (["many ranks,", "little bandwidth"], ["*low_precision_decentralized", "overlap=True",
                                              measured("low_precision_decentralized_overlap")]),
        (["Adam,", "little bandwidth"], ["*zero_one_adam", "after its exact steps", measured("zero_one_adam")]),
        (["a message per step", "is too much"], ["*local_sgd", "every 8 steps", measured("local_sgd")]),
        (["between sites"], ["*diloco", "every 64 steps; long runs", measured("diloco")]),
    ]  # fmt: skip
    for x, heading, entries in ((16, "Which case applies?", left), (388, "What limits the step time?", right)):
        _box(drawing, x, 190, 356, 30, [f"*{heading}"], QUESTION)
        for number, (when, lines) in enumerate(entries):
            y = 232 + 63 * number
            drawing.line([(x + 10, 220), (x + 10, y + 27), (x + 20, y + 27)], EDGE)
            drawing.lines_of_text(x + 24, y + 27, when, "start", 11)
            _box(drawing, x + 132, y, 224, 54, lines, ANSWER)
    time = f"step time: {condition}, {results.hosts} emulated hosts, {results.date}, an exact warm-up of 20 % included"
    loss = (
        f"loss: text task, 160 steps, positive is worse than DDP, {convergence.date}; not measured: not in this setting"
    )
    drawing.text(16, 626, time, size=10, colour=GREY)
    drawing.text(16, 639, loss, size=10, colour=GREY)
    return drawing


_WAY = [
    ("backward pass", "autograd writes p.grad, a view of its bucket", "bagua.engine"),
    ("hook", "counts the gradient; complete buckets are announced in the same order on all ranks", "bagua.engine"),
    ("algorithm", "on_ready launches the exchange of the bucket", "bagua.algorithms"),
    ("lane", "queues the exchange on a thread (gloo) or a stream (NCCL) of its own", "bagua.engine"),
    ("within the node", "gradients are summed in full precision on the node's first rank", "bagua.exchanges"),
    ("rows", "the sum is split into one row per node", "bagua.exchanges"),
    ("codec", "each row is encoded: 8 bits per element", "bagua.codecs"),
    ("network", "each row is sent to its owner as soon as it is encoded", "bagua.comm"),
    ("mean", "the owner decodes, averages in fp32, encodes once and sends the mean to all", "bagua.comm"),
    ("decoded", "the mean is decoded into the same bucket and broadcast within the node", "bagua.exchanges"),
    ("end of backward", "on_backward_end waits for the exchanges in flight", "bagua.engine"),
    ("optimizer", "reads p.grad, now the mean", "torch"),
]


def draw_way() -> Drawing:
    """The path of a gradient in hierarchical ByteGrad."""
    drawing = Drawing(760, 40 + 44 * len(_WAY), "Path of a gradient")
    for number, (name, what, where) in enumerate(_WAY):
        y = 16 + 44 * number
        beside = 3 <= number <= 9
        _box(drawing, 16, y, 130, 30, [f"*{name}"], ANSWER if beside else QUESTION)
        drawing.text(160, y + 13, what)
        drawing.text(160, y + 27, where, size=10, colour=GREY)
        if number:
            drawing.arrow([(81, y - 14), (81, y)])
    drawing.text(16, 30 + 44 * len(_WAY), "yellow: on the training thread; blue: on a lane, beside the backward pass",
                 size=10, colour=GREY)  # fmt: skip
    return drawing
