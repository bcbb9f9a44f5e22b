"""Codecs and exchanges within FSDP2, on gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import bagua
from bagua.comm.groups import Meter
from bagua.exchanges import AllReduce
from bagua.interop import CompressedFSDP, compress_fsdp
from bagua.interop.fsdp import _AllGather
from tests.engine.training import batch, equal
from tests.rank_pool import RankPool

Options = dict[str, Any]
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def make(layout: str, options: Options | None, policy: Options) -> tuple[nn.Module, CompressedFSDP | None]:
    """A sharded model over one dimension ("flat"), torch's own replicas ("native"), or replicas of ours ("hybrid")."""
    torch.manual_seed(2 if layout != "hybrid" else dist.get_rank() // 2)  # ours make the replicas equal
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Sequential(nn.Linear(64, 50), nn.Tanh()), nn.Linear(50, 3))
    given: Options = {"mp_policy": MixedPrecisionPolicy(**policy)}
    extra: Options = {}
    if layout != "flat":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        given["mesh"] = mesh if layout == "native" else mesh["shard"]
        extra = {"replica_group": mesh["replicate"]} if layout == "hybrid" else {}
    fully_shard(model[2], **given)
    fully_shard(model, **given)
    return model, None if options is None else compress_fsdp(model, **options, **extra)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = (model(batch(dist.get_rank(), step)).float() - 1).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.full_tensor().clone() for name, param in model.state_dict().items()}


def follow(layout: str, options: Options | None, policy: Options, steps: int) -> tuple[Any, list[float], int]:
    model, state = make(layout, options, policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = train(model, optimizer, range(steps))
    return whole(model), losses, state.bytes_sent if state is not None else 0


def close(left: dict[str, Any], right: dict[str, Any], tolerance: float) -> None:
    for name, want in right.items():
        torch.testing.assert_close(left[name], want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("layout", "size", "options"),
    [
        ("flat", 2, {"reduce_scatter": "identity", "all_gather": "identity"}),
        ("native", 4, {"reduce_scatter": "identity", "all_gather": "identity"}),
        ("hybrid", 4, {"reduce_scatter": "identity", "replica": "gradient_allreduce"}),
    ],
)
def test_without_loss_it_is_torchs_own(layout: str, size: int, options: Options, pool: RankPool) -> None:
    plain_layout = "native" if layout == "hybrid" else layout
    seen = pool.run(size, follow, layout, options, {}, 4)
    want = pool.run(size, first_seed if layout == "hybrid" else follow, plain_layout, None, {}, 4)
    for (weights, _, sent), (expected, *_) in zip(seen, want, strict=True):
        close(weights, expected, 1e-5)
        assert sent > 0


def first_seed(layout: str, options: Options | None, policy: Options, steps: int) -> Any:
    """As `follow`, from the weights of the first replica of the hybrid layout."""
    original = torch.manual_seed
    torch.manual_seed = lambda seed: original(0)
    try:
        return follow(layout, options, policy, steps)
    finally:
        torch.manual_seed = original


@pytest.mark.parametrize(
    ("layout", "size", "options", "policy"),
    [
        ("flat", 2, {"reduce_scatter": "minmax_uint8", "all_gather": "minmax_uint8"}, {}),
        slow("flat", 2, {"reduce_scatter": "int4"}, {}),
        slow("flat", 2, {"reduce_scatter": "bf16", "all_gather": "bf16"}, {}),
        slow("flat", 2, {"reduce_scatter": "int4", "all_gather": "minmax_uint8"}, {"param_dtype": torch.bfloat16}),
        slow("flat", 2, {"reduce_scatter": "minmax_uint8"}, {"reduce_dtype": torch.float16}),
        ("hybrid", 4, {"reduce_scatter": "int4", "all_gather": "bf16", "replica": "bytegrad"}, {}),
    ],
)
def test_it_trains_and_sends_less(layout: str, size: int, options: Options, policy: Options, pool: RankPool) -> None:
    results = pool.run(size, follow, layout, options, policy, 25)
    lossless = {name: "identity" if name != "replica" else "gradient_allreduce" for name in options}
    _, _, dense = pool.run(size, follow, layout, lossless, {}, 25)[0]
    for weights, losses, sent in results:
        assert equal(weights, results[0][0])
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
        assert 0 < sent < 0.6 * dense


def interrupted(layout: str, path: str, options: Options) -> bool:
    """Stop after 4 of 8 steps, and resume through torch.distributed.checkpoint."""
    model, state = make(layout, options, {})
    assert state is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(4))
    ours, theirs = get_state_dict(model, optimizer)
    shards = bagua.checkpoint.Shards({"compression": state})
    dcp.save({"model": ours, "optimizer": theirs, "bagua": shards}, checkpoint_id=path)
    train(model, optimizer, range(4, 8))
    want, kept = whole(model), state.state_dict()

    torch.manual_seed(9)
    model, state = make(layout, options, {})
    assert state is not None
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ours, theirs = get_state_dict(model, optimizer)
    shards = bagua.checkpoint.Shards({"compression": state}, reading=path)
    loaded = {"model": ours, "optimizer": theirs, "bagua": shards}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(model, optimizer, range(4, 8))
    assert any(tensors for tensors in kept["residuals"].values()), "no residual: nothing is tested"
    return equal(whole(model), want) and equal(state.state_dict(), kept)


@pytest.mark.parametrize(
    ("layout", "size", "more"),
    [("flat", 2, {"all_gather": "minmax_uint8"}), ("hybrid", 4, {"replica": bagua.algorithms.ByteGrad(codec="int4")})],
)
def test_resuming_through_dcp_is_bit_identical(
    layout: str, size: int, more: Options, pool: RankPool, tmp_path: Any
) -> None:
    assert all(pool.run(size, interrupted, layout, str(tmp_path / "dcp"), {"reduce_scatter": "int4", **more}))


def residuals(policy: Options, saved: Any) -> tuple[Any, bool]:
    """On a rank: one step under `policy` from the states `saved`, if any; its own after it, and whether ranks agree."""
    model, state = make(
        "hybrid", {"reduce_scatter": "int4", "replica": bagua.algorithms.ByteGrad(codec="int4")}, policy
    )
    assert state is not None
    if saved is not None:
        state.load_state_dict(saved[dist.get_rank()])
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
    weights = [param.full_tensor() for param in model.parameters()]  # pyright: ignore
    first = [weight.clone() for weight in weights]
    for weight in first:
        dist.broadcast(weight, 0)
    return state.state_dict(), all(torch.equal(a, b) for a, b in zip(weights, first, strict=True))


def residual_dtypes(state: Any) -> set[torch.dtype]:
    scatters = [each for params in state["residuals"].values() for each in params.values()]
    replicas = [each["tensors"]["residual"] for sets in state["replicas"].values() for each in sets]
    assert scatters and replicas
    return {each.dtype for each in (*scatters, *replicas)}


def test_error_feedback_follows_the_dtype_that_fsdp_reduces_in(pool: RankPool) -> None:
    """By default `param_dtype`, but from torch 2.15 on the parameters' own; a checkpoint may be of the other one."""
    half, default = torch.bfloat16, torch.float32 if TORCH >= (2, 15) else torch.bfloat16
    saved = None
    for policy, expected in (
        ({"param_dtype": half}, default),
        ({"param_dtype": half, "reduce_dtype": torch.float32}, torch.float32),
        ({"param_dtype": half, "reduce_dtype": half}, half),
        ({"param_dtype": half}, default),
    ):
        done = pool.run(4, residuals, policy, saved)
        saved = [state for state, _ in done]
        assert all(residual_dtypes(state) == {expected} for state in saved)
        assert all(alike for _, alike in done)


def refuse(path: str) -> list[str]:
    model, _ = make("flat", None, {})
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    native = fully_shard(nn.Linear(6, 4), mesh=mesh)
    replicas = mesh["replicate"]
    messages = []
    for error, call in [
        (TypeError, lambda: compress_fsdp(3, reduce_scatter="int4")),  # type: ignore[arg-type]
        (ValueError, lambda: compress_fsdp(nn.Linear(2, 2), reduce_scatter="int4")),
        (ValueError, lambda: compress_fsdp(model)),
        (ValueError, lambda: compress_fsdp(model, reduce_scatter="nonsense")),
        (ValueError, lambda: compress_fsdp(model, all_gather="int4", error_feedback=True)),
        (ValueError, lambda: compress_fsdp(model, reduce_scatter="bf16", error_feedback=True)),
        (ValueError, lambda: compress_fsdp(model, replica="power_sgd", replica_group=replicas)),
        (ValueError, lambda: compress_fsdp(model, replica="bytegrad")),
        (ValueError, lambda: compress_fsdp(model, reduce_scatter="int4", replica_group=replicas)),
        (ValueError, lambda: compress_fsdp(native, replica="bytegrad", replica_group=replicas)),
        (ValueError, lambda: compress_fsdp(model, replica=AllReduce(), replica_group=mesh)),
        (ValueError, lambda: compress_fsdp(model, all_gather="int4").load_state_dict({"residuals": {"x": {}}})),
        (bagua.checkpoint.CheckpointError, lambda: bagua.checkpoint.save(path, {"model": model}, step=1)),
    ]:
        with pytest.raises(error) as caught:
            call()
        messages.append(str(caught.value))
    gather, packed = _AllGather(bagua.codecs.get("int4"), Meter()), torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="one floating dtype") as caught:
        gather(packed, packed[:2], mesh.get_group("shard"))  # torch packs dtypes that differ into bytes
    return [*messages, str(caught.value)]


def test_bad_input_is_refused(pool: RankPool, tmp_path: Any) -> None:
    for said in pool.run(2, refuse, str(tmp_path)):
        words = [
            "expected a torch.nn.Module",
            "fully_shard",
            "at least one of reduce_scatter, all_gather and replica",
            "nonsense",
            "needs a lossy codec for reduce_scatter",
            "bf16",
        ]
        words += [
            "power_sgd",
            "replica_group",
            "given without replica",
            'mesh["shard"]'.replace('"', "'"),
            "one dimension",
        ]
        words += ["residuals do not match", "is a DTensor", "one floating dtype"]
        assert len(words) == len(said)
        assert all(word in message for word, message in zip(words, said, strict=True)), said


def lacking(name: str, option: str) -> str:
    model, _ = make("flat", None, {})
    method = getattr(FSDPModule, name)
    delattr(FSDPModule, name)
    try:
        with pytest.raises(RuntimeError) as caught:
            compress_fsdp(model, **{option: "bytegrad" if option == "replica" else "int4"})
    finally:
        setattr(FSDPModule, name, method)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("set_custom_reduce_scatter", "reduce_scatter"),
        ("set_custom_all_gather", "all_gather"),
        ("set_all_reduce_hook", "replica"),
    ],
)
def test_a_torch_without_the_hook_is_an_error(name: str, option: str, pool: RankPool) -> None:
    (said,) = pool.run(1, lacking, name, option)
    assert name in said and torch.__version__ in said
