"""The parts of a run, in order, with the time that each may take."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.gpu.record import Record

__all__ = ["PARTS", "Part"]


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        module: of this package; its `run` makes the part.
        limit_s: after so long it is ended; a whole run stays below an hour.
        about: one line.
    """

    name: str
    module: str
    limit_s: int
    about: str

    def run(self, record: Record) -> None:
        """Make it here."""
        importlib.import_module(f"benchmarks.gpu.{self.module}").run(record)


PARTS = {
    part.name: part
    for part in (
        Part("environment", "environment", 60, "GPU, driver, torch, NCCL, Triton"),
        Part("tests", "suite", 480, "the tests that take a CUDA device"),
        Part("kernels", "kernels", 480, "Triton kernels against the torch references, bit for bit"),
        Part("rates", "rates", 240, "codecs as a share of the memory bandwidth"),
        Part("optimizer", "optimizer", 120, "fused optimizers: bits and step time"),
        Part("graphs", "graphs", 60, "CUDA graphs: steps refused, codecs captured"),
        Part("nccl", "nccl", 150, "NCCL's calls, a mirrored team, two ranks on one GPU"),
        Part("net", "net", 90, "Bagua-Net in NCCL's log"),
        Part("overlap", "overlap", 120, "exchanges beside the backward pass; step time beside DDP"),
        Part("shared", "shared", 300, "tests with several ranks over NCCL, on one GPU"),
        Part("link", "link", 600, "step time beside DDP over NCCL on emulated networks"),
        Part("faults", "faults", 420, "a rank is killed and comes back"),
        Part("launches", "launches", 60, "CPU time of launching codecs and exchanges"),
    )
}
