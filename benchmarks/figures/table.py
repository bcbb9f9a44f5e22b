"""Tables of step times: a short one of speed-ups for README, and the full grids for the page on performance."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures.advice import worst_loss
from benchmarks.figures.pairs import DILOCO, EDEN, EXACT_SHARE, LOCAL_SGD, POWER_SGD
from benchmarks.figures.results import TORCH, Tradeoff, newest_complete, timed
from benchmarks.figures.suite import Suite
from benchmarks.figures.tradeoff import STEPS

__all__ = ["NETWORKS", "grid", "speedups", "warm_up"]

NETWORKS = ("1gbit/5ms", "250mbit/0ms", "100mbit/5ms")
_WARMED = ("qadam", "qadam_1bit", "one_bit_lamb")
# Entrant, how it is called, whether 20 % of its steps are exact ones.
_ROWS = (
    ("bytegrad", "`bytegrad`, 8 bits", False),
    ("int4", '`gradient_allreduce`, `codec="int4"`', False),
    (EDEN, '`gradient_allreduce`, `codec="eden:bits=2"`', False),
    (POWER_SGD, "`power_sgd`", False),
    ("qadam_1bit", '`qadam`, `codec="sign"`, after its warm-up', False),
    ("qadam_1bit", "the same with 20 % exact warm-up", True),
    (LOCAL_SGD, "`local_sgd`: every 2 steps, 8 bits", False),
    (DILOCO, "`diloco`: every 3 steps, 3 bits", False),
)
_COMPRESSED, _SELDOM = ("bytegrad", "int4", "qadam_1bit", "power_sgd"), ("local_sgd", "diloco")
_HOOKS = {
    "ddp": "none",
    "ddp_fp16": "fp16",
    "ddp_bf16": "bf16",
    "ddp_powersgd": "PowerSGD",
    "post_local_sgd": "post-local SGD",
}


def speedups(learnt: Suite) -> str:
    """Times as fast as DDP on three networks and what it costs, the best of torch's own hooks first."""
    runs = {condition: newest_complete(condition) for condition in NETWORKS}
    heads = ["", "1 Gbit/s, 5 ms", "250 Mbit/s, 0 ms", "100 Mbit/s, 5 ms", "loss, worst task"]
    lines = [_line(heads[0], heads[1:]), "|---|---|---|---|---|"]
    lines.append(_line("step of DDP", [*(f"{runs[c].row(c, 'ddp')['step_ms']:.0f} ms" for c in NETWORKS), ""]))  # pyright: ignore[reportOptionalSubscript]
    best = [(c, runs[c].best_of_torch(c)) for c in NETWORKS]
    hooks = [f"{_cell(runs[c], c, name)} ({_HOOKS[name]})" for c, name in best]
    lines.append(_line("best hook of torch", [*hooks, "not measured"]))
    for entrant, label, warm in _ROWS:
        share = EXACT_SHARE if warm else 0.0
        cells = [_cell(timed(c, entrant), c, entrant, share) for c in NETWORKS]
        lines.append(_line(label, [*cells, worst_loss(learnt, entrant)]))
    return "\n".join(lines) + f"\n\n{_without_limit()}\n"


def _without_limit() -> str:
    """What is gained where the link is no limit."""
    condition = "nolimit"
    results = newest_complete(condition)
    less, seldom = (max(results.speedup(condition, name) or 0.0 for name in names) for names in (_COMPRESSED, _SELDOM))
    return (
        f"Without a bandwidth limit, compression gains {less:.1f}x at most, and exchanges every 8 to 64 steps "
        f"{seldom:.1f}x."
    )


def grid(results: Tradeoff) -> str:
    """All entrants under all conditions, and where they come from."""
    origin = (
        f"{results.date}, {results.cpu}, {results.hosts} emulated hosts with one rank each, "
        f"{results.num_elements / 1e6:.2g} M fp32 parameters, 300 ms of emulated compute: "
        f"`{results.path}`.\n\n"
    )
    lines = [f"| | {' | '.join(results.all_conditions)} |", "|---" * (1 + len(results.all_conditions)) + "|"]
    for name in STEPS:
        label = f"torch `{name}`" if name in TORCH else f"`{name}`"
        lines.append(_line(label, [_timing(results, condition, name) for condition in results.all_conditions]))
    lines.append(_line("rows with a star", [_starred(results, condition) for condition in results.all_conditions]))
    return origin + "\n".join(lines) + "\n"


def warm_up(results: Tradeoff) -> str:
    """Speed-ups of optimizers with an exact warm-up: after it, and of a training in which it is 20 % of the steps."""
    head = [condition for condition in results.all_conditions if results.row(condition, _WARMED[0])]
    lines = [f"| | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for name in _WARMED:
        cells = [
            f"{results.speedup(c, name):.1f}x, with warm-up {results.speedup(c, name, EXACT_SHARE):.1f}x" for c in head
        ]
        lines.append(_line(f"`{name}`", cells))
    return "\n".join(lines) + "\n"


def _starred(results: Tradeoff, condition: str) -> str:
    """How many rows of a condition the machine may have limited."""
    names = [name for name in STEPS if results.row(condition, name)]
    return f"{sum(bool(results.limited(condition, name)) for name in names)} of {len(names)}"


def _line(label: str, cells: Sequence[str]) -> str:
    return f"| {label} | {' | '.join(cells)} |".replace("|  |", "| |")


def _cell(results: Tradeoff, condition: str, entrant: str, exact_share: float = 0.0) -> str:
    speedup = results.speedup(condition, entrant, exact_share)
    return "not measured" if speedup is None else f"{speedup:.1f}x"


def _timing(results: Tradeoff, condition: str, name: str) -> str:
    row = results.row(condition, name)
    if row is None:
        return "not measured"
    star = "*" if row["limited"] else ""
    return f"{row['step_ms']:.0f} ms{star}, {results.speedup(condition, name):.2f}x, {row['efficiency']:.2f}"
