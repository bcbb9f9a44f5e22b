"""`Shards` refuses a mix of two saves to the same `checkpoint_id`, and tensors that are not as they were saved."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from bagua.checkpoint import CheckpointError, Shards
from tests.engine.training import distributed, equal, train, values
from tests.rank_pool import RankPool

OPTIONS: dict[str, dict[str, Any]] = {"bytegrad": {"codec": "int4"}, "local_sgd": {"communication_interval": 2}}
OVERWRITTEN = "a later save to the same checkpoint_id has not been completed"


def made(algorithm: str) -> dict[str, Any]:
    model, optimizer = distributed(algorithm=algorithm, **OPTIONS[algorithm])
    return {"model": model, "optimizer": optimizer}


def save_twice(algorithm: str, place: str, broken: int) -> None:
    """Of the second save, the rank `broken` writes nothing."""

    class Broken(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if dist.get_rank() == broken:
                raise OSError("broken off")
            return super().write_data(plan, planner)

    state = made(algorithm)
    train(state["model"], state["optimizer"], range(3))
    dcp.save({"training": Shards({**state, "epoch": 1})}, checkpoint_id=place)
    train(state["model"], state["optimizer"], range(3, 6))
    with pytest.raises(dcp.CheckpointException, match="broken off"):
        dcp.save({"training": Shards({**state, "epoch": 2})}, storage_writer=Broken(place))


def load_mix(algorithm: str, place: str) -> tuple[str, bool]:
    state = made(algorithm)
    before = {name: value.clone() for name, value in values(state["model"]).items()}
    with pytest.raises(CheckpointError) as caught:
        dcp.load({"training": Shards(state, reading=place)}, checkpoint_id=place)
    return str(caught.value), equal(values(state["model"]), before)


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_a_second_save_that_was_broken_off(pool: RankPool, tmp_path: Path, algorithm: str, broken: int) -> None:
    pool.run(2, save_twice, algorithm, str(tmp_path), broken)
    for size in (2, 1):
        for message, unchanged in pool.run(size, load_mix, algorithm, str(tmp_path)):
            assert message.startswith(f"loading from torch.distributed.checkpoint: rank 0 of {size}: ")
            assert OVERWRITTEN in message
            assert unchanged


def complete_twice(algorithm: str, place: str) -> bool:
    state = made(algorithm)
    for steps in (range(3), range(3, 6)):
        train(state["model"], state["optimizer"], steps)
        dcp.save({"training": Shards(state)}, checkpoint_id=place)
    expected = values(state["model"])
    state = made(algorithm)
    dcp.load({"training": Shards(state, reading=place)}, checkpoint_id=place)
    return equal(values(state["model"]), expected)


def test_a_second_save_that_is_complete_counts(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, complete_twice, "local_sgd", str(tmp_path)) == [True, True]


def of_two_saves() -> str:
    state = made("local_sgd")
    saves = [Shards(state).state_dict() for _ in range(2)]
    with pytest.raises(CheckpointError) as caught:
        Shards(state).load_state_dict(saves[dist.get_rank()])
    return str(caught.value)


def test_each_rank_has_read_another_save(pool: RankPool) -> None:
    for message in pool.run(2, of_two_saves):
        assert f"ranks 0 and 1 have read different saves: {OVERWRITTEN}" in message


# -- one rank, without torch.distributed ----------------------------------------------------------------------------

TENSORS = {
    "float": torch.randn(5),
    "scalar": torch.tensor(3.0),
    "transposed": torch.randn(4, 3).t(),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "bfloat16": torch.randn(7).bfloat16(),
    "float8": torch.randn(7).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "int64": torch.arange(9),
}


def read(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `dcp.load` does."""
    return {key: torch.empty(each.shape, dtype=each.dtype).copy_(each.detach()) for key, each in entries.items()}


def load(entries: dict[str, Tensor]) -> dict[str, Any]:
    shards = Shards({})
    shards.load_state_dict(entries)
    return shards.data


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_is_not_as_it_was_saved(name: str) -> None:
    entries = read(Shards({"kept": torch.ones(2), "state": {"x": TENSORS[name]}}).state_dict())
    assert torch.equal(load(entries)["state"]["x"].to(torch.complex128), TENSORS[name].detach().to(torch.complex128))
    entries["@state@1@0@1"].view(-1)[-1:].view(torch.uint8)[0] ^= 1
    with pytest.raises(CheckpointError, match=f"'state': a tensor is not as it was saved: .*{OVERWRITTEN}"):
        load(entries)


def test_a_tensor_that_is_missing() -> None:
    entries = read(Shards({"state": torch.ones(2)}).state_dict())
    del entries["@state@1@0@1"]
    with pytest.raises(CheckpointError, match="'state': a tensor is not as it was saved"):
        load(entries)


def outline_of_before(entry: Tensor) -> Tensor:
    """As it was before saves had an identity."""
    stream = io.BytesIO()
    torch.save(torch.load(io.BytesIO(bytes(entry.tolist())), weights_only=True)[:2], stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def test_saves_without_an_identity_are_loaded() -> None:
    entries = read(Shards({"state": {"x": torch.ones(2)}, "epoch": 3}).state_dict())
    old = {key: outline_of_before(each) if key.endswith("@0") else each for key, each in entries.items()}
    data = load(old)
    assert (data["epoch"], data["state"]["x"].tolist()) == (3, [1.0, 1.0])
    old["@epoch@1@0@0"] = entries["@epoch@1@0@0"]  # a new save has begun to overwrite an old one
    with pytest.raises(CheckpointError, match=OVERWRITTEN):
        load(old)
