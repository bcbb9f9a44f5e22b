"""Error feedback with unbiased codecs: on by default for SGD, off for optimizers that scale each element."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import bagua
from bagua.algorithms import Algorithm, ByteGrad, GradientAllReduce, Warmup
from bagua.comm.team import Team
from tests.algorithms.quadratic import Quadratic, targets
from tests.rank_threads import run_teams

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def state_of(team: Team, algorithm: Algorithm, makes: tuple[Any, ...]) -> set[str]:
    """Names of the tensors that the exchange keeps, after two steps."""
    model = Quadratic()
    parts = [[model.b], [model.w]] if len(makes) == 2 else [list(model.parameters())]
    own = [make(part) for make, part in zip(makes, parts, strict=True)]
    bagua.distribute(model, own, algorithm, process_group=team)
    for step in range(2):
        for each in own:
            each.zero_grad()
        model(torch.tensor(targets(2, step)[team.rank], dtype=torch.float32)).backward()
        for each in own:
            each.step()
    kept = {name for entry in bagua.state_dict(model)["states"] for name in entry["tensors"]}
    bagua.detach(model)
    return kept & {"residual", "magnitude"}


@pytest.mark.parametrize(
    ("algorithm", "makes", "kept"),
    [
        (ByteGrad(codec="eden"), (SGD,), "residual"),
        (GradientAllReduce(codec="eden:bits=2"), (SGD, SGD), "residual"),
        (Warmup(1, "gradient_allreduce", ByteGrad(codec="eden")), (SGD,), "residual"),
        (ByteGrad(codec="eden"), (ADAMW,), "magnitude"),
        (ByteGrad(codec="eden"), (SGD, ADAMW), "magnitude"),
        (ByteGrad(codec="eden", error_feedback=False), (SGD,), "magnitude"),
        (ByteGrad(codec="eden", running_scale=True), (SGD,), "magnitude"),
        (ByteGrad(), (SGD,), ""),
        (ByteGrad(codec="sign"), (ADAMW,), "residual"),
        (ByteGrad(gather_codec="eden"), (SGD,), "residual"),
        (ByteGrad(gather_codec="sign"), (ADAMW,), "residual"),
        (ByteGrad(codec="eden", gather_codec="eden:bits=2"), (ADAMW,), "magnitude"),
    ],
    ids=[
        *("sgd", "2 bits", "after a warm-up", "adamw", "both", "no feedback", "scaled", "8 bits", "biased"),
        *("means unbiased", "means biased", "means scaled"),
    ],
)
def test_default_depends_on_the_optimizer(algorithm: Algorithm, makes: tuple[Any, ...], kept: str) -> None:
    assert all(each == ({kept} if kept else set()) for each in run_teams(2, state_of, algorithm, makes))
