"""fp16 with a gradient scaler: where one rank overflows, all ranks skip the step, with every kind of algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.conftest import Loops

pytest.importorskip("accelerate", reason="needs accelerate; `make test-interop` runs it")
pytest.importorskip("transformers", reason="needs transformers; `make test-interop` runs it")
pytestmark = [pytest.mark.process, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

from tests.interop import half_precision_runs as runs  # noqa: E402


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd"])
@pytest.mark.parametrize("loop", ["accelerate", "trainer"])
def test_all_ranks_skip_the_step_that_one_cannot_make(loops: Loops, tmp_path: Path, loop: str, algorithm: str) -> None:
    given = [algorithm] if loop == "accelerate" else [algorithm, str(tmp_path)]
    for rank in loops.run(2, getattr(runs, loop), *given):
        assert rank["skipped"] == [step == runs.LOST for step in range(5)]
        assert (rank["scaler"], rank["scale"]) == ("bagua.GradScaler", 2.0**15)  # halved once
        assert rank["finite"] and rank["dtypes"] == {"torch.float16"}
        assert (rank["ranks"][0] == rank["ranks"][1]).all()
