"""Several lanes, and buckets that are cut in parts, change when things happen and not what comes out."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
import bagua.engine.lanes.dispatcher as dispatcher
from bagua import algorithms, codecs
from bagua.algorithms import Algorithm
from bagua.comm.groups import Groups
from bagua.engine.api import live_engines
from bagua.engine.distributed_module import attached_buckets
from bagua.engine.lanes.lane import ThreadLane
from bagua.engine.reducer.bucketing import check_num_lanes, default_num_lanes
from tests.rank_pool import RankPool
from tests.rank_threads import run_threads

ALGORITHMS = ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "diloco"]


def train(algorithm: str, part_bytes: int, num_lanes: int, resume: bool = False, **options: Any) -> Any:
    """On a rank: parameters after 6 steps, and how many lanes and parts there were."""
    before, dispatcher.PART_BYTES = dispatcher.PART_BYTES, part_bytes
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96), nn.Linear(96, 50))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def start() -> None:
            bagua.distribute(model, optimizer, algorithm, num_lanes=num_lanes, bucket_bytes=40_000, **options)

        start()
        for step in range(6):
            if resume and step == 3:
                state, weights = bagua.state_dict(model), copy.deepcopy(model.state_dict())
                bagua.detach(model)
                start()
                model.load_state_dict(weights)  # replicas differ in some
                bagua.load_state_dict(model, state)
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(8, 96, generator=generator)).square().mean().backward()
            optimizer.step()
        engine = live_engines()[-1]
        parts = [len(bucket.parts(engine.dispatcher.part_bytes or 1 << 30)) for bucket in attached_buckets(model)]
        values = [param.detach().clone() for param in model.parameters()]
        facts = len(engine.pool.shared), parts
        bagua.detach(model)
        return values, facts
    finally:
        dispatcher.PART_BYTES = before


def compare(algorithm: str, options: dict[str, Any]) -> tuple[Any, Any]:
    one, plain = train(algorithm, 1 << 30, 1, **options)
    many, cut = train(algorithm, 8_192, 4, **options)
    again, _ = train(algorithm, 8_192, 4, **options)
    assert all(torch.equal(a, b) for a, b in zip(many, again, strict=True)), "the same run gave other bits"
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)  # codes are rounded within other blocks
    resumed, _ = train(algorithm, 8_192, 4, resume=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(many, resumed, strict=True)), "state of parts was lost"
    return plain, cut


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_results(pool: RankPool, algorithm: str) -> None:
    for plain, cut in pool.run(3, compare, algorithm, {}):
        assert plain == (1, [1] * len(plain[1]))
        assert cut[0] == 4
        assert max(cut[1]) > 1


def test_error_feedback_is_kept_for_each_part(pool: RankPool) -> None:
    pool.run(2, compare, "gradient_allreduce", {"codec": "int4", "error_feedback": True})


def refuse() -> list[str]:
    found = []
    for value in (0, 65, 2.0, True, "4"):
        model = nn.Linear(2, 2)
        try:
            bagua.distribute(model, torch.optim.SGD(model.parameters()), num_lanes=value)  # type: ignore[arg-type]
        except ValueError as error:
            found.append(str(error))
    return found


def test_wrong_numbers_are_refused(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for messages in pool.run(2, refuse):
        assert len(messages) == 5
        assert all("num_lanes" in message and "1 to 64" in message for message in messages)
    monkeypatch.setenv("BAGUA_NUM_LANES", "7")
    assert default_num_lanes() == 7
    monkeypatch.setenv("BAGUA_NUM_LANES", "seven")
    with pytest.raises(ValueError, match="BAGUA_NUM_LANES.*seven"):
        default_num_lanes()
    with pytest.raises(ValueError, match="lanes.*65"):
        check_num_lanes("lanes", 65)


def other_numbers() -> str:
    model = nn.Linear(2, 2)
    with pytest.raises(bagua.RankMismatchError) as caught:
        bagua.distribute(model, torch.optim.SGD(model.parameters()), num_lanes=1 + dist.get_rank())
    return str(caught.value)


def test_ranks_must_agree(pool: RankPool) -> None:
    assert all("num_lanes" in message for message in pool.run(2, other_numbers))


@pytest.mark.parametrize(
    ("algorithm", "factor"),
    [
        (algorithms.get("gradient_allreduce"), 2),
        (algorithms.get("gradient_allreduce", codec="bf16"), 2),
        (algorithms.get("bytegrad"), 1),
        (algorithms.get("bytegrad", codec="int4"), 2),
        (algorithms.get("qadam", codec="sign"), 8),
        (algorithms.get("low_precision_decentralized"), 1),
        (algorithms.Warmup(3), 1),
    ],
)
def test_parts_are_larger_where_lanes_matter_less(algorithm: Algorithm, factor: int) -> None:
    for size in (1, 2, 4, 8):
        assert dispatcher.fitting_part_bytes(algorithm, size) == factor * dispatcher.PART_BYTES


def launch_within_blocks(groups: Groups) -> list[str]:
    lane, go, seen = ThreadLane(groups), threading.Event(), []

    def job() -> None:
        go.wait(60)
        seen.append(codecs.backend())

    with codecs.use_backend("torch"):
        lane.submit(job, "within")
    with codecs.use_backend(codecs.available_backends()[-1]):  # another one when the job comes to run
        go.set()
        lane.submit(job, "later").wait()
    lane.submit(job, "outside").wait()
    lane.close()
    return seen


def test_a_lane_uses_the_codec_backend_of_the_caller() -> None:
    fastest = codecs.available_backends()[-1]
    assert run_threads(1, launch_within_blocks) == [["torch", fastest, codecs.backend()]]
