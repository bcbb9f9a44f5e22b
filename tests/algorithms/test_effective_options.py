"""`bagua.stats(module).algorithm` shows the options with which an algorithm runs, not those that were left open."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import bagua
from bagua.algorithms import Algorithm, AsyncModelAverage, ByteGrad, GradientAllReduce, LocalSGD, PowerSGD, Warmup
from bagua.comm.team import Team
from tests.algorithms.quadratic import Quadratic
from tests.rank_threads import run_teams

SGD = partial(torch.optim.SGD, lr=0.01)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def told(team: Team, algorithm: Algorithm, make: Any) -> str:
    model = Quadratic()
    bagua.distribute(model, make(model.parameters()), algorithm, process_group=team)
    shown = bagua.stats(model).algorithm
    bagua.detach(model)
    return shown


@pytest.mark.parametrize(
    ("algorithm", "make", "shown"),
    [
        (GradientAllReduce(codec="eden:bits=1"), SGD, "error_feedback=True, running_scale=False"),
        (GradientAllReduce(codec="eden:bits=1"), ADAMW, "error_feedback=False, running_scale=True"),
        (ByteGrad(), ADAMW, "error_feedback=False, running_scale=False, denoise_second_moment=False"),
        (ByteGrad(gather_codec="sign"), SGD, "error_feedback=True"),
        (LocalSGD(), ADAMW, "communication_interval=2, hierarchical=False, codec='minmax_uint8'"),
        (LocalSGD(communication_interval=4), SGD, "codec='identity'"),
        (AsyncModelAverage(), SGD, "codec='int4'"),
        (PowerSGD(), SGD, "codec='bf16'"),
        (PowerSGD(rank=4), SGD, "codec='identity'"),
        (Warmup(2, "gradient_allreduce", PowerSGD()), SGD, "then=PowerSGD(rank=None, error_feedback=True"),
    ],
)
def test_the_statistics_show_what_is_used(algorithm: Algorithm, make: Any, shown: str) -> None:
    for each in run_teams(2, told, algorithm, make):
        assert shown in each, each


def test_momenta_have_feedback_below_8_bits() -> None:
    assert bagua.algorithms.get("qadam", codec="sign").effective_options == {"error_feedback": True}
    assert bagua.algorithms.get("qadam").effective_options == {"error_feedback": False}
