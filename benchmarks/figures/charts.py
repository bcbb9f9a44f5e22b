"""Charts of boxes: which algorithm to choose, and which way a gradient goes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures.advice import worst_loss
from benchmarks.figures.pairs import DILOCO, EDEN, LAMB, LOCAL_SGD, POWER_SGD, SUITE, exact_share
from benchmarks.figures.results import timed
from benchmarks.figures.suite import Suite
from benchmarks.figures.svg import ANSWER, EDGE, GREY, QUESTION, Drawing

__all__ = ["draw_choice", "draw_way"]

_CONDITION = "100mbit/5ms"
_WIDTH = 480  # on a phone, letters of 12 are 9 pixels high


def _box(drawing: Drawing, x: float, y: float, width: float, height: float, lines: Sequence[str], fill: str) -> None:
    drawing.box(x, y, width, height, fill, EDGE, 6)
    drawing.lines_of_text(x + width / 2, y + height / 2, lines, size=12)


def draw_choice(learnt: Suite) -> Drawing:
    """Questions, and for each answer what was measured."""

    def measured(entrant: str) -> str:
        speedup = timed(_CONDITION, entrant).speedup(_CONDITION, entrant, exact_share(entrant))
        loss = worst_loss(learnt, entrant) if entrant in SUITE else "see its page"
        return f"{speedup:.1f} x DDP, loss {loss.partition(' (')[0]}"

    drawing = Drawing(_WIDTH, 734, "Choosing an algorithm")
    _box(drawing, 12, 12, 300, 44, ["*Train with gradient_allreduce.",
         "Does a step wait long for communication?"], QUESTION)  # fmt: skip
    _box(drawing, 352, 12, 116, 44, ["*keep it", "it is exact"], ANSWER)
    drawing.arrow([(312, 34), (352, 34)])
    drawing.text(322, 29, "no")
    drawing.arrow([(123, 56), (123, 88)])
    drawing.text(131, 77, "yes")
    _box(drawing, 12, 88, 300, 44, ["*Must all ranks hold the same weights",
         "*after each step?"], QUESTION)  # fmt: skip
    drawing.arrow([(123, 132), (123, 164)])
    drawing.text(131, 153, "yes")
    drawing.arrow([(312, 110), (357, 110), (357, 164)])
    drawing.text(322, 104, "no, averages suffice")

    left = [
        ("start with", ["*bytegrad", measured("bytegrad")]),
        ("still waiting", ["*gradient_allreduce", 'codec="eden:bits=2"', measured(EDEN)]),
        ("still waiting, CPUs are busy", ["*gradient_allreduce", 'codec="int4"', measured("int4")]),
        ("large matrices", ["*power_sgd", measured(POWER_SGD)]),
        ("Adam, thousands of steps", ["*qadam", 'codec="sign"', measured("qadam_1bit")]),
        ("LAMB, large batches", ["*one_bit_lamb", measured(LAMB)]),
    ]
    right = [
        ("some ranks are slow", ["*async", measured("async")]),
        ("latency is high", ["*decentralized", 'peer_selection_mode="shift_one"',
                               measured("decentralized_shift_one")]),
        ("many ranks, little bandwidth", ["*low_precision_decentralized", measured("low_precision_decentralized")]),
        ("Adam, little bandwidth", ["*zero_one_adam", "after its exact steps", measured("zero_one_adam")]),
        ("a message per step is too much", ["*local_sgd", "every 2 steps, 8 bits", measured(LOCAL_SGD)]),
        ("between sites", ["*diloco", "every 3 steps, 3 bits", measured(DILOCO)]),
    ]  # fmt: skip
    for x, heading, entries in ((12, "Which case applies?", left), (246, "What limits the step time?", right)):
        _box(drawing, x, 164, 222, 28, [f"*{heading}"], QUESTION)
        for number, (when, lines) in enumerate(entries):
            y = 212 + 80 * number
            drawing.text(x + 4, y, when)
            _box(drawing, x, y + 5, 222, 52, lines, ANSWER)
    first, more = timed(_CONDITION, "ddp"), timed(_CONDITION, DILOCO)
    captions = (
        f"step time: {_CONDITION}, {first.hosts} emulated hosts, {first.date} and {more.date};",
        "qadam and one_bit_lamb with an exact warm-up of 20 %",
        f"loss: the suite's worst task, positive is worse than DDP, {learnt.date}",
    )
    for number, words in enumerate(captions):
        drawing.text(12, 694 + 15 * number, words, size=11, colour=GREY)
    return drawing


_WAY = [
    ("backward pass", "autograd writes p.grad, a view of its bucket", "bagua.engine"),
    ("hook", "counts the gradient; complete buckets are launched*in the same order on all ranks", "bagua.engine"),
    ("algorithm", "on_ready launches the exchange of the bucket", "bagua.algorithms"),
    ("lane", "queues the exchange on a thread (gloo)*or a stream (NCCL) of its own", "bagua.engine"),
    ("within the node", "gradients are summed in full precision*on the node's first rank", "bagua.exchanges"),
    ("rows", "the sum is split into one row per node", "bagua.exchanges"),
    ("codec", "each row is encoded: 8 bits per element", "bagua.codecs"),
    ("network", "each row is sent to its owner once it is encoded", "bagua.comm"),
    ("mean", "the owner decodes, averages in fp32, encodes once*and sends the mean to all", "bagua.comm"),
    ("decoded", "the mean is decoded into the same bucket*and broadcast within the node", "bagua.exchanges"),
    ("end of backward", "on_backward_end waits for the exchanges", "bagua.engine"),
    ("optimizer", "reads p.grad, now the mean", "torch"),
]


def draw_way() -> Drawing:
    """The path of a gradient in hierarchical ByteGrad."""
    drawing = Drawing(_WIDTH, 40 + 54 * len(_WAY), "Path of a gradient")
    for number, (name, what, where) in enumerate(_WAY):
        y = 16 + 54 * number
        beside = 3 <= number <= 9
        _box(drawing, 12, y, 118, 34, [f"*{name}"], ANSWER if beside else QUESTION)
        lines = what.split("*")
        for line, words in enumerate(lines):
            drawing.text(140, y + 13 + 15 * line, words)
        drawing.text(140, y + 13 + 15 * len(lines), where, size=11, colour=GREY)
        if number:
            drawing.arrow([(71, y - 20), (71, y)])
    drawing.text(12, 28 + 54 * len(_WAY), "yellow: on the training thread; blue: on a lane, beside the backward pass",
                 size=11, colour=GREY)  # fmt: skip
    return drawing
