"""Part 10: the tests with several ranks over NCCL, the ranks on one GPU; each says that it is a host of its own.

Part 2 runs them over gloo, by way of host memory.
"""

from __future__ import annotations

import torch

from benchmarks.gpu import suite
from benchmarks.gpu.record import Record, Skip
from tests.rank_pool import SHARE_GPU

__all__ = ["run"]


def run(record: Record) -> None:
    """One check for each test file."""
    if record.dry or not torch.cuda.is_available():
        with record.check("tests with several ranks"):
            raise Skip("no GPU")
        return
    files = [path for path in suite.select(suite.TESTS)[0] if "pool: RankPool" in path.read_text()]
    suite.pytest_into(record, files, "gpu and process and not slow", jobs=3, env={SHARE_GPU: "nccl"})
