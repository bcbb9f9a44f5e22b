"""Which step time and which loss were measured with the same settings."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

import torch

import bagua
from bagua.algorithms.feedback import fit_feedback
from bagua.bench import contenders
from bagua.bench.training import make_optimizer as timed_optimizer
from bagua.codecs import get as get_codec
from benchmarks.convergence.configurations import make_optimizer as trained_optimizer
from benchmarks.figures.results import Convergence, Tradeoff

__all__ = [
    "CANDIDATES",
    "DILOCO",
    "EDEN",
    "EXACT_SHARE",
    "LAMB",
    "LOCAL_SGD",
    "POWER_SGD",
    "SUITE",
    "differences",
    "exact_share",
    "paired",
    "suite_differences",
]

# The entrant of `bagua bench` and the configuration of the convergence benchmark that might go together.
CANDIDATES = {
    "gradient_allreduce": "gradient_allreduce",
    "gradient_allreduce_bf16": "gradient_allreduce bf16",
    "bytegrad": "bytegrad",
    "int4": "bytegrad int4 + feedback",
    "qadam": "qadam",
    "qadam_1bit": "qadam sign",
    "one_bit_lamb": "one_bit_lamb sign",
    "zero_one_adam": "zero_one_adam",
    "power_sgd": "power_sgd",
    "decentralized": "decentralized all",
    "decentralized_shift_one": "decentralized shift_one",
    "low_precision_decentralized": "low_precision_decentralized",
    "low_precision_decentralized_overlap": "low_precision overlapped",
    "async": "async",
    "local_sgd": "local_sgd",
    "diloco": "diloco",
    "sparse_loco": "sparse_loco",
}
# Algorithms at their defaults, where the entrant of that name has other options; and 2 bits.
DILOCO = "diloco:communication_interval=3,delay=0,codec=eden:bits=3,outer_lr=1.0,outer_momentum=0.0,nesterov=False"
EDEN = "bytegrad:codec=eden:bits=2"
LAMB = "one_bit_lamb:codec=minmax_uint8"
LOCAL_SGD = "local_sgd:communication_interval=2,codec=minmax_uint8"
POWER_SGD = "power_sgd:rank=None"


class _Learnt(NamedTuple):
    """Rows of the convergence suite: of which setting, and with which optimizers."""

    setting: str
    families: tuple[str, ...] = ("sgd", "adamw")


# The entrant of `bagua bench`, and where the convergence suite has its loss.
SUITE = {
    "bytegrad": _Learnt("bytegrad"),
    "int4": _Learnt("bytegrad codec=int4"),
    EDEN: _Learnt("bytegrad codec=eden:bits=2"),
    POWER_SGD: _Learnt("power_sgd"),
    "qadam_1bit": _Learnt("qadam codec=sign", ("adamw",)),
    "zero_one_adam": _Learnt("zero_one_adam", ("adamw",)),
    LAMB: _Learnt("one_bit_lamb", ("lamb",)),
    "decentralized_shift_one": _Learnt("decentralized peer_selection_mode=shift_one"),
    "low_precision_decentralized": _Learnt("low_precision_decentralized"),
    LOCAL_SGD: _Learnt("local_sgd"),
    DILOCO: _Learnt("diloco"),
}
# Of the steps in the convergence benchmark that QAdam and 1-bit LAMB make in full precision.
EXACT_SHARE = 0.2
_WARMED = ("qadam", "one_bit_lamb")
_TWO_STAGES = (*_WARMED, "zero_one_adam")  # 0/1 Adam's exact steps become rarer and rarer: they are no fixed share
# Settings that do not change what is sent: how the weights move, and when the exact steps end (see `exact_share`).
_NO_TRAFFIC = {"params", "lr", "warmup_steps", "var_freeze_step"}


def exact_share(entrant: str) -> float:
    """The share of its steps that an entrant makes in full precision first, in the training that its loss is of."""
    return EXACT_SHARE if contenders.get(entrant).algorithm in _WARMED else 0.0


def differences(entrant: str, configuration: str, times: Tradeoff, runs: Convergence) -> list[str]:
    """Return what differs between the setting that was timed and the one that was trained; [] if they are equal."""
    found = _unlike(_timed(entrant), _trained(runs, configuration))
    if not found and entrant == "async":  # rounds follow one another as fast as the network lets them
        every, also = _steps_a_round(times), _trained_steps_a_round(runs)
        if abs(every / also - 1) > 0.1:
            found.append(f"a round every {every:.1f} steps in the time, {also:.1f} in the loss")
    return found


def paired(times: Tradeoff, runs: Convergence) -> dict[str, str]:
    """Return the entrants that were timed and trained with the same settings, with their configurations."""
    return {entrant: name for entrant, name in CANDIDATES.items() if not differences(entrant, name, times, runs)}


def suite_differences(entrant: str) -> list[str]:
    """Return what differs between the setting that was timed and the one of `SUITE`; [] if they are equal."""
    name, _, words = SUITE[entrant].setting.partition(" ")
    options = dict(word.split("=", 1) for word in words.split(", ") if word)
    contender, optimizer = contenders.get(entrant), torch.optim.SGD([torch.zeros(1)], lr=1.0)
    timed = _resolved(contender.algorithm, contender.options, "sgd", optimizer)
    return _unlike(timed, _resolved(name, options, "sgd", optimizer))


def _unlike(timed: dict[str, Any], trained: dict[str, Any]) -> list[str]:
    return [
        f"{name} {timed.get(name)} in the time, {trained.get(name)} in the loss"
        for name in sorted(timed.keys() | trained.keys())
        if timed.get(name) != trained.get(name)
    ]


def _timed(entrant: str) -> dict[str, Any]:
    found = contenders.get(entrant)
    model = torch.nn.Linear(1, 1)
    optimizer = timed_optimizer(found.optimizer, model, emulated=False)  # pyright: ignore[reportArgumentType]
    return _resolved(found.algorithm, found.options, found.optimizer, optimizer)


def _trained(runs: Convergence, configuration: str) -> dict[str, Any]:
    settings = runs.settings(configuration)
    algorithm, kind = settings.pop("algorithm"), settings.pop("optimizer")
    optimizer = trained_optimizer(kind, torch.nn.Linear(1, 1).parameters(), 0.1, 160)
    return _resolved(algorithm, settings, kind, optimizer)


def _resolved(algorithm: str, options: Any, kind: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All settings that decide what is sent and when, defaults included."""
    made = bagua.algorithms.get(algorithm, **options)
    assert is_dataclass(made) and not isinstance(made, type)
    found = asdict(made)
    if isinstance(found.get("codec"), str) and "error_feedback" in found:
        found["error_feedback"] = fit_feedback(found["error_feedback"], get_codec(found["codec"]))
    # bytegrad is gradient_allreduce with another codec by default, where each host has one rank.
    found["algorithm"] = "gradient_allreduce" if algorithm == "bytegrad" else algorithm
    if kind in _TWO_STAGES:
        found |= {name: value for name, value in optimizer.param_groups[0].items() if name not in _NO_TRAFFIC}
    return found


def _steps_a_round(times: Tradeoff) -> float:
    condition = times.conditions[-1]
    sent, whole = times.row(condition, "async"), times.row(condition, "gradient_allreduce")
    return whole["bytes_per_host"] / sent["bytes_per_host"] if sent and whole else float("nan")


def _trained_steps_a_round(runs: Convergence) -> float:
    sent, whole = (runs.row("char_lm", name)["bytes_per_step"] for name in ("async", "gradient_allreduce"))
    return whole / sent
