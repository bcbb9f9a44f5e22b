"""The rows of the suite: every algorithm at its defaults, and the settings that the documentation recommends.

An algorithm that is registered and not named here gets a row at its defaults in each family. To add a setting, add an
entry to SETTINGS: `(algorithm with options, families)`, in the grammar of `benchmarks.convergence.periodic`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import bagua
from benchmarks.convergence.byte_gpt import OWN_OPTIMIZERS
from benchmarks.convergence.configurations import DDP, Configuration
from benchmarks.convergence.periodic import parse_row

__all__ = [
    "BASELINE",
    "BUDGETS",
    "FAMILIES",
    "ORDERS",
    "SuiteRow",
    "all_rows",
    "budget_row",
    "control_row",
    "select_rows",
]

BASELINE = "gradient_allreduce"
FAMILIES = ("sgd", "adamw", "lamb", "muon")
BUDGETS = tuple(Fraction(1, 2**k) for k in range(1, 7))  # parts of the steps, for what the baseline does with less
ORDERS = 4  # runs of the baseline with other samples, for each family, task and seed
_BOTH = ("sgd", "adamw")  # families that an algorithm runs in unless it says otherwise
_ONLY = {"qadam": ("adamw",), "zero_one_adam": ("adamw",), "one_bit_lamb": ("lamb",)}  # for want of another optimizer
_OWN = {name: name for name in (*OWN_OPTIMIZERS, "one_bit_lamb", "dion")}  # optimizers
SETTINGS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("bytegrad:codec=eden/bits~1", _BOTH),
    ("bytegrad:codec=eden/bits~2", _BOTH),
    ("bytegrad:codec=eden/bits~4", _BOTH),
    ("bytegrad:codec=eden/bits~1/states~32", _BOTH),
    ("bytegrad:codec=eden/bits~2/states~8", _BOTH),
    ("bytegrad:codec=eden/bits~1:gather_codec=eden/bits~2/states~8", _BOTH),
    ("bytegrad:codec=eden/bits~1:denoise_second_moment=False", ("adamw",)),
    ("bytegrad:codec=eden/bits~2:denoise_second_moment=False", ("adamw",)),
    ("bytegrad:codec=eden/bits~1:error_feedback=False", ("sgd",)),
    ("bytegrad:codec=eden/bits~2:error_feedback=False", ("sgd",)),
    ("qadam:codec=eden", ("adamw",)),
    ("zero_one_adam:codec=eden", ("adamw",)),
    ("one_bit_lamb:codec=eden", ("lamb",)),
    ("one_bit_lamb:codec=sign", ("lamb",)),
    ("diloco:communication_interval=16:codec=identity", ("sgd", "adamw", "muon")),
    ("diloco:communication_interval=64:codec=identity", ("sgd", "adamw", "muon")),
    ("diloco:communication_interval=8", ("sgd", "adamw", "muon")),
    ("diloco:communication_interval=8:scale_second_moment=True", ("adamw",)),
    ("async:mean_moments=False", ("adamw",)),
    ("decentralized:mean_moments=False", ("adamw",)),
    ("decentralized:mean_moments=False:scale_second_moment=True", ("adamw",)),
    ("low_precision_decentralized:scale_second_moment=True", ("adamw",)),
    ("low_precision_decentralized:gradient_interval=0", ("adamw",)),
    ("decentralized:peer_selection_mode=shift_one:gradient_interval=0", ("adamw",)),
    ("sparse_loco:communication_interval=15", _BOTH),
    ("sparse_loco:communication_interval=1", ("adamw",)),
    ("sparse_loco:communication_interval=4", ("adamw",)),
    ("local_sgd@0.25", _BOTH),
    ("local_sgd:mean_moments=False", ("adamw",)),
    ("local_sgd:communication_interval=8:codec=identity", _BOTH),
    ("local_sgd:communication_interval=8:codec=identity:scale_second_moment=True", ("adamw",)),
    ("power_sgd:rank=1", _BOTH),
    ("power_sgd:rank=4", _BOTH),
    ("power_sgd:rank=16", _BOTH),
    ("demo", ("adamw",)),
    ("diloco", ("muon",)),
    ("dion", ("muon",)),
    ("dion:rank_fraction=0.5", ("muon",)),
    ("bytegrad:codec=int4", _BOTH),
    ("bytegrad:codec=sign", ("sgd",)),
    ("bytegrad:codec=sign:error_feedback=False", ("sgd",)),
    ("bytegrad:codec=sign/block~128", ("sgd",)),
    ("decentralized:peer_selection_mode=shift_one", _BOTH),
    ("low_precision_decentralized:overlap=True", _BOTH),
    ("diloco@0.25", _BOTH),
    ("qadam:codec=sign", ("adamw",)),
    ("power_sgd@0.1", _BOTH),
)


@dataclass(frozen=True)
class SuiteRow:
    """A row, and how early it is run.

    Attributes:
        configuration: what is run; its family names the baseline.
        label: without the family.
        rank: rows of a lower one are run first: 0 baselines and defaults, 1 baselines with less, 2 settings, 3 what
            runs in processes, 4 controls.
        share: of the steps.
        order: 0, or which of the other orders of samples is trained on.
    """

    configuration: Configuration
    label: str
    rank: int
    share: Fraction = Fraction(1)
    order: int = 0

    @property
    def name(self) -> str:
        """Of the configuration."""
        return self.configuration.name

    @property
    def baseline(self) -> bool:
        """Whether others are compared with it."""
        return self.label == BASELINE and self.share == 1 and not self.order


def _row(setting: str, family: str, rank: int) -> SuiteRow:
    name, options, warmup = parse_row(setting)
    label = " ".join([name, ", ".join(f"{key}={value}" for key, value in options.items())]).strip()
    label += f" after {100 * warmup:g} %" if warmup else ""
    processes = bagua.algorithms.get(name).exactness is bagua.algorithms.Exactness.ASYNCHRONOUS
    optimizer = _OWN.get(name, family)
    made = Configuration(f"{label}, {family}", family, name, options, warmup, optimizer, processes)
    return SuiteRow(made, label, 3 if processes else rank)


def budget_row(family: str, share: Fraction) -> SuiteRow:
    """Return the baseline of a family with a part of its steps; its schedule is as much shorter."""
    row = _row(BASELINE, family, 1)
    name = f"{row.name}, {share} of the steps"
    return replace(row, configuration=replace(row.configuration, name=name), share=share)


def control_row(family: str, order: int) -> SuiteRow:
    """Return the baseline of a family with other samples: how far apart two runs are that differ in nothing else."""
    row = _row(BASELINE, family, 4)
    return replace(row, configuration=replace(row.configuration, name=f"{row.name}, order {order}"), order=order)


def _ddp(family: str) -> SuiteRow:
    return SuiteRow(Configuration(f"{DDP}, {family}", family, "", processes=True), DDP, 3)


def all_rows() -> list[SuiteRow]:
    """Return every row, in the order of the tables."""
    found: list[SuiteRow] = []
    names = [row.name for row in bagua.algorithms.available(builtin_only=True) if row.name != BASELINE]
    for family in FAMILIES:
        found.append(_row(BASELINE, family, 2 if family == "muon" else 0))
        found += [_ddp(family)] if family in _BOTH else []
        found += [_row(name, family, 0) for name in names if family in _ONLY.get(name, _BOTH)]
        found += [_row(setting, family, 2) for setting, chosen in SETTINGS if family in chosen]
        found += [budget_row(family, share) for share in BUDGETS]
        found += [control_row(family, order + 1) for order in range(ORDERS) if family in _BOTH]
    return found


def select_rows(words: Iterable[str]) -> list[SuiteRow]:
    """Return the rows that have one of `words` as name, label, algorithm or family, and their baselines.

    Raises:
        ValueError: a word fits no row.
    """
    rows, chosen = all_rows(), set[str]()
    for word in words:
        fits = {row.name for row in rows if word in _names(row)}
        if not fits:
            raise ValueError(f"--only: {word!r} is no row; there are: {'; '.join(row.name for row in rows)}")
        chosen |= fits
    kept = {row.configuration.family for row in rows if row.name in chosen}
    return [row for row in rows if row.name in chosen or (row.baseline and row.configuration.family in kept)]


def _names(row: SuiteRow) -> tuple[str, ...]:
    if row.share != 1 or row.order:
        return (row.name, "controls" if row.order else "budgets")
    return (row.name, row.label, row.configuration.algorithm, row.configuration.family)
