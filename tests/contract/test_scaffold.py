"""What somebody adds in one file of their own keeps to the contracts, with nothing else edited."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import bagua
from bagua import algorithms, codecs
from bagua.testing import check_algorithm, check_codec

pytestmark = pytest.mark.process
ROOT = Path(__file__).parent.parent.parent
NEW = '''"""Ternary gradients: an algorithm and its codec."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bagua import algorithms, codecs
from bagua.algorithms import Algorithm, Bucket, Context, Exactness
from bagua.codecs import Codec
from bagua.exchanges import Exchange, mix


@codecs.register
@dataclass(frozen=True)
class Ternary(Codec):
    """-s, 0 or s in 2 bits each: 0 below `threshold` times the largest magnitude of the row, s the mean of the rest.

    Source: arXiv:1605.04711 (ternary weight networks), section 2.2, with another threshold.
    """

    name: ClassVar[str] = "ternary"
    linear: ClassVar[bool] = False
    lossless: ClassVar[bool] = False

    threshold: float = 0.25

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not 0 <= self.threshold < 1:
            raise ValueError(f"threshold: expected a number with 0 <= threshold < 1, got {self.threshold!r}")

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return 4 + (n + 15) // 16 * 4 if n else 0

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        x_RN = x_RN.float()
        size_RN = x_RN.abs()
        large_RN = size_RN > self.threshold * size_RN.amax(1, keepdim=True)  # false where the row holds a NaN
        count_R = large_RN.sum(1).clamp(min=1)
        scale_R = (size_RN * large_RN).sum(1) / count_R + (x_RN * 0).sum(1)  # NaN if anything is not finite
        code_RN = torch.where(large_RN, 1 + (x_RN < 0).int(), 0).to(torch.uint8)
        code_RM = torch.nn.functional.pad(code_RN, (0, (wire_RW.shape[1] - 4) * 4 - x_RN.shape[1]))
        wire_RW[:, :4].view(torch.float32).copy_(scale_R[:, None])
        shifts_4 = torch.tensor([1, 4, 16, 64], dtype=torch.uint8)
        wire_RW[:, 4:].copy_((code_RM.unflatten(1, (-1, 4)) * shifts_4).sum(2))

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        code_RM = (wire_RW[:, 4:, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(1)
        sign_RN = torch.tensor([0.0, 1.0, -1.0, 0.0])[code_RM[:, : out_RN.shape[1]].long()]
        out_RN.copy_(sign_RN * wire_RW[:, :4].clone().view(torch.float32))


@algorithms.register
@dataclass(frozen=True)
class TernaryMomentum(Algorithm):
    """The mean of all momenta in 2 bits, with error feedback.

    Args:
        momentum: of the gradients before they are encoded.
    """

    name: ClassVar[str] = "ternary_momentum"
    summary: ClassVar[str] = "mean of all momenta in 2 bits"
    exactness: ClassVar[Exactness] = Exactness.LOSSY

    momentum: float = 0.5
    hierarchical: bool = False

    @cached_property
    def exchange(self) -> Exchange:
        return mix("complete", "ternary", error_feedback=True, hierarchical=self.hierarchical)

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        x, m = bucket.flat, ctx.tensor("momentum", bucket)
        ctx.launch(self.exchange, bucket, before=lambda: x.copy_(m.lerp_(x, 1 - self.momentum)))

    def on_backward_end(self, ctx: Context) -> None:
        ctx.wait()
'''


@pytest.fixture
def added(tmp_path: Path) -> Iterator[Path]:
    """The file, imported."""
    path = tmp_path / "ternary_momentum.py"
    path.write_text(NEW)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
        yield path
    finally:
        del sys.modules[path.stem]
        algorithms.registry.registry.unregister("ternary_momentum")
        codecs.registry.registry.unregister("ternary")


@pytest.mark.usefixtures("added")
def test_it_keeps_to_the_contracts() -> None:
    check_codec("ternary")
    check_algorithm("ternary_momentum", optimizer=lambda params: torch.optim.SGD(params, lr=0.05))


@pytest.mark.usefixtures("added")
def test_it_is_known_by_name_and_not_one_of_the_library() -> None:
    (row,) = [row for row in algorithms.available() if row.name == "ternary_momentum"]
    assert row.exactness == "lossy synchronous" and 0.37 < row.bytes_per_step < 0.38
    assert "ternary_momentum" not in {row.name for row in algorithms.available(builtin_only=True)}
    assert "ternary" in codecs.available() and "ternary" not in codecs.available(builtin_only=True)
    run = bagua.simulate(
        "bytegrad",
        codec="ternary",
        ranks=2,
        model=lambda: nn.Linear(4, 2),
        loss=lambda module, rank, step: module(torch.ones(1, 4)).square().sum(),
        steps=3,
    )
    assert run.consensus.max() == 0 and run.bytes_sent > 0


# Tests that read the registries, where one more entry must make no difference.
READERS = (
    "tests/test_registry.py",
    "tests/docs/test_docs.py::test_the_table_of_algorithms_is_that_of_the_code",
    "tests/docs/test_docs.py::test_every_algorithm_and_option_is_described",
    "tests/docs/test_docs.py::test_the_bytes_on_the_pages_are_those_of_the_code",
    "tests/docs/test_readme.py::test_it_counts_the_algorithms",
    "tests/docs/test_site.py::test_every_public_name_is_in_the_reference",
    "tests/algorithms/test_exactness.py",
    "tests/bench/test_arguments.py::test_every_algorithm_takes_part",
    "tests/benchmarks/test_figures.py",
    "tests/codecs/test_codec_backends.py::test_get_by_name_and_by_instance",
    "tests/codecs/test_ops.py::test_every_codec_has_operators",
    "tests/parity/test_page.py::test_the_tables_have_the_same_columns",
)


@pytest.mark.process
@pytest.mark.slow
def test_the_tests_of_the_library_do_not_mind(tmp_path: Path) -> None:
    (tmp_path / "ternary_momentum.py").write_text(NEW)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "ternary_momentum", *READERS]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=140
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


CONTRIB = """
import bagua
before = {row.name for row in bagua.algorithms.available()}, set(bagua.codecs.available())
assert "signsgd" not in before[0]
import bagua.contrib
names = {row.name for row in bagua.algorithms.available()}
assert names - before[0] == {"decoupled_diloco", "demo", "dion", "signsgd"}, names
builtin = {row.name for row in bagua.algorithms.available(builtin_only=True)}
assert builtin == before[0] and set(bagua.codecs.available(builtin_only=True)) == before[1]
assert bagua.algorithms.get("signsgd", momentum=0.5) == bagua.contrib.SignSGD(momentum=0.5)
"""


@pytest.mark.process
def test_contrib_registers_when_it_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", CONTRIB], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
