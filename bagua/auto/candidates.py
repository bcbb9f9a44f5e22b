"""What can be chosen: algorithms with options, by class; and those that need an optimizer of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua.algorithms import Algorithm, get
from bagua.algorithms.auto import ALLOWED

__all__ = ["CANDIDATES", "EXACT", "NEED_OPTIMIZER", "Candidate", "allowed"]


@dataclass(frozen=True)
class Candidate:
    """An algorithm with options.

    Attributes:
        algorithm: registered name.
        kind: class, one of `ALLOWED`.
        row: of the benchmark that measured its loss, or a row that bounds it: more steps between two averages, or a
            lower rank.
        options: of the algorithm.
        feedback: the compression error of a step is added to the next, or averages out as it is unbiased, so that a
            large one is no sign of harm.
        period: steps after which the pattern of steps repeats.
        ladder: whose rungs differ in precision only; "" for none.
        rung: on it, bits of an element or a rank; higher is more precise.
    """

    algorithm: str
    kind: str
    row: str
    options: Mapping[str, Any] = field(default_factory=dict)
    feedback: bool = False
    period: int = 1
    ladder: str = ""
    rung: int = 0

    @property
    def name(self) -> str:
        """As on the command line of `bagua plan`.

        Examples:
            >>> from bagua.auto.candidates import Candidate
            >>> Candidate("bytegrad", "lossy", "bytegrad eden 4 bits", {"codec": "eden:bits=4"}).name
            'bytegrad:codec=eden:bits=4'
        """
        return self.algorithm + "".join(
            f"{',' if position else ':'}{key}={value}" for position, (key, value) in enumerate(self.options.items())
        )

    @property
    def alike(self) -> str:
        """Equal for settings whose steps cost a CPU about the same; "" for one without such others.

        Examples:
            >>> from bagua.auto.candidates import CANDIDATES
            >>> sorted({each.alike for each in CANDIDATES})
            ['', 'bits', 'bits eden', 'rank']
        """
        codec = str(self.options.get("codec", "")).partition(":")[0]
        return f"{self.ladder} {codec}".strip() if self.ladder else ""

    def make(self, nodes: tuple[tuple[int, ...], ...], optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
        """The algorithm, fitted to the job's nodes and optimizers as `distribute` does."""
        return get(self.algorithm, **self.options).for_optimizers(optimizers).for_nodes(nodes)[0]


EXACT = Candidate("gradient_allreduce", "exact", "gradient_allreduce")


def _local(algorithm: str, row: str, interval: int) -> Candidate:
    options: dict[str, Any] = {"communication_interval": interval}
    if algorithm == "diloco":
        options |= {"delay": 0, "codec": "identity"}
    return Candidate(algorithm, "periodic", row, options, period=interval)


_ROUNDS_OF_2 = {"communication_interval": 2, "codec": "minmax_uint8"}
_ROUNDS_OF_3 = {
    "communication_interval": 3,
    "delay": 0,
    "codec": "eden:bits=3",
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
}


def _bits(bits: int, codec: str, row: str) -> Candidate:
    options = {"codec": codec} if codec else {}
    return Candidate("bytegrad", "lossy", row, options, feedback=bits < 8, ladder="bits", rung=bits)


def _biased(codec: str) -> Candidate:
    return Candidate("bytegrad", "lossy", f"bytegrad {codec} + feedback", {"codec": codec}, feedback=True)


def _low_rank(rank: int) -> Candidate:
    # The tasks of the benchmark have matrices so small that rank 16 leaves most of them whole: rank 4 bounds it.
    return Candidate("power_sgd", "lossy", "power_sgd", {"rank": rank}, feedback=True, ladder="rank", rung=rank)


def _gossip(algorithm: str, row: str, **options: Any) -> Candidate:
    return Candidate(algorithm, "decentralized", row, options)


CANDIDATES: tuple[Candidate, ...] = (
    EXACT,
    Candidate("gradient_allreduce", "exact", "gradient_allreduce", {"hierarchical": True}),
    Candidate("gradient_allreduce", "lossy", "gradient_allreduce bf16", {"codec": "bf16"}, rung=16),
    _bits(8, "", "bytegrad"),
    _bits(4, "eden:bits=4", "bytegrad eden 4 bits"),
    _bits(2, "eden:bits=2", "bytegrad eden 2 bits"),
    _bits(1, "eden:bits=1", "bytegrad eden 1 bit"),
    *(_biased(codec) for codec in ("int4", "sign", "top_k")),
    *(_low_rank(rank) for rank in (4, 16, 64)),
    _local("local_sgd", "local_sgd", 2),
    _local("local_sgd", "local_sgd", 4),
    _local("local_sgd", "local_sgd", 8),
    _local("diloco", "diloco", 16),
    Candidate("local_sgd", "periodic", "local_sgd short rounds", _ROUNDS_OF_2, period=2),
    Candidate("diloco", "periodic", "diloco short rounds", _ROUNDS_OF_3, period=3),
    _gossip("decentralized", "decentralized all"),
    _gossip("decentralized", "decentralized shift_one", peer_selection_mode="shift_one"),
    _gossip("low_precision_decentralized", "low_precision_decentralized"),
    _gossip("low_precision_decentralized", "low_precision overlapped", overlap=True),
    Candidate("async", "asynchronous", "async", {"sync_interval_ms": 0}),
)

NEED_OPTIMIZER: Mapping[str, str] = {
    "qadam": "bagua.optim.QAdam",
    "one_bit_lamb": "bagua.optim.OneBitLamb",
    "zero_one_adam": "bagua.optim.ZeroOneAdam",
}


def allowed(allow: str, nodes: tuple[tuple[int, ...], ...]) -> Iterator[Candidate]:
    """The candidates of class `allow` and of the classes before it, the first one exact.

    Examples:
        >>> from bagua.auto.candidates import allowed
        >>> [each.name for each in allowed("exact", ((0,), (1,)))]
        ['gradient_allreduce']
    """
    kinds = ALLOWED[: ALLOWED.index(allow) + 1]
    hierarchy = len(nodes) > 1 and any(len(node) > 1 for node in nodes)
    for each in CANDIDATES:
        if each.kind in kinds and (hierarchy or "hierarchical" not in each.options):
            yield each
