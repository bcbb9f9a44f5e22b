"""Error feedback within FSDP2 where a step uses some of a module's parameters only, on gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bagua.algorithms import ByteGrad
from bagua.interop import CompressedFSDP, compress_fsdp
from tests.engine.training import equal
from tests.rank_pool import RankPool

Options = dict[str, Any]
TOP_K: Options = {"reduce_scatter": "top_k"}
REPLICA: Options = {"replica": ByteGrad(codec="sign", error_feedback=True)}


class Routed(nn.Module):
    """Two layers of equal size, one of which a step uses; the trunk is of another size."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 12, bias=False)
        self.routes = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(layers))

    def forward(self, x: Tensor, route: int) -> Tensor:
        return self.routes[route](self.trunk(x).tanh())


def make(options: Options, layers: int = 2) -> tuple[nn.Module, CompressedFSDP]:
    torch.manual_seed(0)
    model = Routed(layers)
    given: Options = {}
    more: Options = {}
    if "replica" in options:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        given, more = {"mesh": mesh["shard"]}, {"replica_group": mesh["replicate"]}
    fully_shard(model, **given)
    return model, compress_fsdp(model, **options, **more)


def gradients(model: nn.Module, route: int, scale: float, step: int = 0) -> dict[str, Tensor]:
    """What a backward pass through one route leaves in the parameters that it uses."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model.zero_grad()
    (model(x, route).square().sum() * scale).backward()
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {name: grad.full_tensor().clone() for name, grad in found.items()}  # pyright: ignore


def turns(options: Options) -> tuple[float, bool]:
    """The largest gradient of a layer whose own is 0, after another; then, whether the first still has its residual."""
    model, _ = make(options)
    alone, _ = make(options, layers=1)
    first, want = gradients(model, 0, 100.0), gradients(alone, 0, 100.0)
    assert {*first} == {*want} == {"trunk.weight", "routes.0.weight"}
    stray = gradients(model, 1, 0.0)["routes.1.weight"]
    again, want = gradients(model, 0, 1.0, 1), gradients(alone, 0, 1.0, 1)
    return float(stray.abs().max()), torch.equal(again["routes.0.weight"], want["routes.0.weight"])


@pytest.mark.parametrize("options", [TOP_K, REPLICA], ids=["reduce_scatter", "replica"])
def test_a_residual_stays_with_its_parameter(options: Options, pool: RankPool) -> None:
    for stray, kept in pool.run(2, turns, options):
        assert stray == 0
        assert kept


def accumulated(options: Options) -> set[str]:
    """The parameters that have residuals after a pass that was only accumulated, and one through another route."""
    model, state = make(options)
    shards: Any = model
    shards.set_requires_gradient_sync(False)
    gradients(model, 0, 1.0)
    shards.set_requires_gradient_sync(True)
    model(torch.ones(2, 6), 1).sum().backward()
    return {*state.state_dict()["residuals"][""]}


def test_accumulated_gradients_count(pool: RankPool) -> None:
    for names in pool.run(2, accumulated, TOP_K):
        assert names == {"trunk.weight", "routes.0.weight", "routes.1.weight"}


def many_routes(options: Options) -> int:
    model, state = make(options, layers=12)
    for route in range(12):
        gradients(model, route, 1.0)
    return len(state.state_dict()["replicas"][""])


def test_a_replica_keeps_a_few_sets_of_parameters(pool: RankPool) -> None:
    assert pool.run(2, many_routes, REPLICA) == [8, 8]


def earlier(options: Options, key: str) -> tuple[bool, str]:
    """Load what earlier versions saved: by number of elements, of all parameters or of some."""
    model, state = make(options)
    for step in range(2):  # of all parameters
        model.zero_grad()
        (model(torch.full((2, 6), 1.0 + step), 0).sum() + model(torch.ones(2, 6), 1).square().sum()).backward()
    saved: Any = state.state_dict()
    if key == "residuals":
        names = ["trunk.weight", "routes.0.weight", "routes.1.weight"]
        whole = torch.cat([saved[key][""][name] for name in names], dim=1)
        old: Any = {whole.numel(): whole}
        part: Any = {whole[:, 5:].numel(): whole[:, 5:]}
    else:
        (tensors,) = [entry["tensors"] for entry in saved[key][""]]
        size = sum(param.numel() for param in model.parameters())
        old, part = {size: tensors}, {size - 144: tensors}
    state.load_state_dict({**saved, key: {"": old}})
    reloaded: Any = state.state_dict()[key][""]
    with pytest.raises(ValueError) as caught:
        state.load_state_dict({**saved, key: {"": part}})
    return equal(reloaded, saved[key][""]), str(caught.value)


@pytest.mark.parametrize(("options", "key"), [(TOP_K, "residuals"), (REPLICA, "replicas")])
def test_what_earlier_versions_saved_loads_if_it_is_of_all_parameters(
    options: Options, key: str, pool: RankPool
) -> None:
    for loaded, said in pool.run(2, earlier, options, key):
        assert loaded
        assert "an earlier version saved a state" in said and "without the state of compress_fsdp" in said


def refuse() -> list[str]:
    _, state = make(TOP_K)
    saved: Any = state.state_dict()
    messages = []
    for residuals in ({"routes.9.weight": torch.zeros(2, 72)}, {"trunk.weight": torch.zeros(2, 35)}):
        with pytest.raises(ValueError) as caught:
            state.load_state_dict({**saved, "residuals": {"": residuals}})
        messages.append(str(caught.value))
    return messages


def test_residuals_of_other_parameters_are_refused(pool: RankPool) -> None:
    for unknown, size in pool.run(2, refuse):
        assert "no parameter 'routes.9.weight'" in unknown
        assert "trunk.weight has 35 elements" in size and "not 36" in size


def wrapped(options: Options) -> list[Any]:
    """States of a model, and of ones with wrappers that have loaded it: as it is, and as earlier versions saved it."""
    states: list[Any] = []
    for wraps in (False, True):
        torch.manual_seed(0)
        layers: Any = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        given: Options = {}
        more: Options = {}
        if "replica" in options:
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            given, more = {"mesh": mesh["shard"]}, {"replica_group": mesh["replicate"]}
        if wraps:
            layers[0] = checkpoint_wrapper(layers[0])
        for layer in layers:
            fully_shard(layer, **given)
        model: Any = torch.compile(layers, backend="eager") if wraps else layers
        state = compress_fsdp(model, **options, **more)
        if wraps:
            saved, (key,) = states[0], [key for key in states[0] if states[0][key]]
            state.load_state_dict(saved)
            states.append(state.state_dict())
            inner, path = saved[key]["0"], "_orig_mod.0"
            part = "_checkpoint_wrapped_module"
            old: Any = (
                {name.replace("0.", f"{path}.{part}."): each for name, each in inner.items()}
                if key == "residuals"
                else [{**each, "parameters": [f"{path}.{part}.{n[2:]}" for n in each["parameters"]]} for each in inner]
            )
            state.load_state_dict({**saved, key: {path: old, "_orig_mod.1": saved[key]["1"]}})
        else:
            model(torch.ones(2, 6)).square().sum().backward()
        states.append(state.state_dict())
    return states


@pytest.mark.parametrize("options", [TOP_K, REPLICA], ids=["reduce_scatter", "replica"])
def test_wrappers_are_no_part_of_names(options: Options, pool: RankPool) -> None:
    for plain, loaded, earlier_names in pool.run(2, wrapped, options):
        assert equal(loaded, plain) and equal(earlier_names, plain)
        assert all(each["0"] and each["1"] for each in plain.values() if each)


def without_names() -> str:
    model: Any = fully_shard(nn.Linear(6, 4))
    (param,) = (each for each in model._get_fsdp_state()._fsdp_param_group.fsdp_params if each.sharded_param.ndim == 2)
    name = "unsharded_accumulated_grad"
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(type(param) if hasattr(type(param), name) else param, name)  # a property from torch 2.15 on
        compress_fsdp(model, reduce_scatter="top_k", error_feedback=False)
        with pytest.raises(RuntimeError) as caught:
            compress_fsdp(model, reduce_scatter="top_k")
    return str(caught.value)


def test_a_torch_that_does_not_show_the_parameters_is_an_error(pool: RankPool) -> None:
    (said,) = pool.run(1, without_names)
    assert "no unsharded_accumulated_grad" in said and "error_feedback=False" in said and torch.__version__ in said


class Mixed(nn.Module):
    """Parameters in bf16, of which one gets its gradient in fp32."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in (("a", 4), ("b", 6), ("c", 8)):
            self.register_parameter(name, nn.Parameter(torch.ones(rows, 4, dtype=torch.bfloat16)))
        self.b.grad_dtype = torch.float32  # pyright: ignore

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.get_parameter(name).float() * each).sum() for name, each in factors.items()]).sum()


def residuals_of_dtypes() -> dict[str, float]:
    """The largest residual of each parameter, whose gradients are between its own 1 and 32 times 1, 100 or 10,000."""
    model = Mixed()
    fully_shard(model)
    state = compress_fsdp(model, reduce_scatter="top_k")
    sizes = dict(zip("abc", (1.0, 100.0, 10000.0), strict=True))
    model(
        {name: torch.arange(1.0, 1 + p.numel()).view(-1, 4) * sizes[name] for name, p in model.named_parameters()}
    ).backward()
    kept = state.state_dict()["residuals"][""]
    return {name: kept[name].float().abs().max().item() / size for name, size in sizes.items()}


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="torch before 2.15 keeps the order of the parameters")  # pyright: ignore
def test_gradients_of_several_dtypes_keep_their_residuals(pool: RankPool) -> None:
    for found in pool.run(2, residuals_of_dtypes):
        assert all(1 <= each <= 32 for each in found.values()), found
