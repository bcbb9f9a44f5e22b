"""`with_bagua` and the facade's algorithms: the same training as `bagua.distribute`."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from tests.rank_pool import RankPool


def _model(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=generator)).square().sum().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def _same_as_distribute() -> None:
    import bagua.torch_api as api
    from bagua.torch_api.algorithms import Algorithm, bytegrad, decentralized, gradient_allreduce

    rank = dist.get_rank()
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (gradient_allreduce.GradientAllReduceAlgorithm(), "gradient_allreduce", {}),
        (
            gradient_allreduce.GradientAllReduceAlgorithm(average=False),
            "gradient_allreduce",
            {"average": False},
        ),
        (gradient_allreduce.GradientAllReduceAlgorithm(True), "gradient_allreduce", {"hierarchical": True}),
        (bytegrad.ByteGradAlgorithm(), "bytegrad", {"hierarchical": True}),
        (Algorithm.init("bytegrad", hierarchical=False), "bytegrad", {"hierarchical": False}),
        (bagua.algorithms.GradientAllReduce(), "gradient_allreduce", {}),
        (decentralized.DecentralizedAlgorithm(), "decentralized", {"hierarchical": True}),
        (
            decentralized.DecentralizedAlgorithm(False, "shift_one", 2),
            "decentralized",
            {"hierarchical": False, "peer_selection_mode": "shift_one", "communication_interval": 2},
        ),
        (
            Algorithm.init("low_precision_decentralized", hierarchical=False),
            "low_precision_decentralized",
            {"hierarchical": False},
        ),
    ]
    mine = optimizer = None
    for algorithm, name, options in cases:
        mine, reference = _model(rank), _model(rank)
        keys = list(mine.state_dict())
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.01, momentum=0.9)
        assert not hasattr(mine, "bagua_algorithm")
        assert mine.with_bagua([optimizer], algorithm) is mine
        assert mine.bagua_algorithm is algorithm
        assert mine.bagua_optimizers == [optimizer]
        assert bool(mine.bagua_buckets) == ("decentralized" in name), "gradients' order is not known yet"
        other = torch.optim.SGD(reference.parameters(), lr=0.01, momentum=0.9)
        bagua.distribute(reference, other, name, **options)
        for a, b in zip(_train(mine, optimizer), _train(reference, other), strict=True):
            assert torch.equal(a, b)
        assert list(mine.state_dict()) == keys
        assert sum(bucket.flat.numel() for bucket in mine.bagua_buckets) == sum(p.numel() for p in mine.parameters())
    assert mine is not None and mine.bagua_module_name == "Sequential"
    mine.bagua_module_name = "mine"
    assert mine.bagua_module_name == "mine"
    with pytest.raises(TypeError, match="bagua_module_name"):
        mine.bagua_module_name = 3
    plain = copy.deepcopy(mine)
    assert not hasattr(plain, "bagua_algorithm")
    mine.with_bagua(optimizer, bytegrad.ByteGradAlgorithm())  # swaps the algorithm
    assert "ByteGrad" in bagua.stats(mine).algorithm
    api.barrier()


def test_trains_as_distribute_does(pool: RankPool) -> None:
    pool.run(3, _same_as_distribute)


def _subgroup() -> list[float]:
    import bagua.torch_api as api

    rank = dist.get_rank()
    model: Any = nn.Linear(2, 1)
    nn.init.constant_(model.weight, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm = api.algorithms.gradient_allreduce.GradientAllReduceAlgorithm()
    group = api.new_group([1, 2])
    if rank == 0:
        with pytest.raises(ValueError, match="process_group: rank 0 is not one of"):
            model.with_bagua([optimizer], algorithm, process_group=group)
        torch_group = dist.new_group([1, 2])
    else:
        model.with_bagua([optimizer], algorithm, process_group=group)
        first = model.weight.tolist()
        torch_group = dist.new_group([1, 2])
        again: Any = nn.Linear(2, 1)
        again.with_bagua([], algorithm, api.from_torch_group(torch_group))
        nn.init.constant_(again.weight, 0.0)
        again(torch.full((1, 2), float(rank))).sum().backward()
        assert again.weight.grad is not None
        assert again.weight.grad.tolist() == [[1.5, 1.5]]
        return first[0]
    return model.weight.tolist()[0]


def test_process_groups_of_both_kinds(pool: RankPool) -> None:
    assert pool.run(3, _subgroup) == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def _reports() -> list[str]:
    import bagua.torch_api as api
    from bagua.torch_api import report

    said: list[str] = []
    report._said.clear()  # another test may have run in this process
    logging.getLogger("bagua").setLevel(logging.NOTSET)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bagua").addHandler(handler)
    model = _model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm = api.algorithms.gradient_allreduce.GradientAllReduceAlgorithm()
    for _ in range(2):
        model.with_bagua([optimizer], algorithm, do_flatten=False)
    for bad, error, match in (
        (object(), TypeError, "algorithm: expected an object of bagua.torch_api.algorithms"),
        (api.algorithms.bytegrad.ByteGradAlgorithm, TypeError, "got ByteGradAlgorithm"),
        ("none such", ValueError, "algorithm 'none such' is unknown; available: "),
    ):
        with pytest.raises(error, match=match):
            model.with_bagua([optimizer], bad)
    with pytest.raises(TypeError, match="optimizers: expected"):
        model.with_bagua([3], algorithm)
    with pytest.raises(TypeError, match="process_group: expected"):
        model.with_bagua([optimizer], algorithm, process_group="world")
    logging.getLogger("bagua").removeHandler(handler)
    return said


def test_what_cannot_act_is_reported_once(pool: RankPool) -> None:
    [said] = pool.run(1, _reports)
    assert [line for line in said if "do_flatten" in line] == [
        "with_bagua: do_flatten=False has no effect: gradients are always exchanged in flat buckets"
    ]


def test_registry() -> None:
    from bagua.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry
    from bagua.torch_api.algorithms.base import AlgorithmImpl, as_core_algorithm
    from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm

    assert {"bytegrad", "gradient_allreduce"} <= set(GlobalAlgorithmRegistry.available_algorithms())
    assert GlobalAlgorithmRegistry.get("bytegrad") is ByteGradAlgorithm
    with pytest.raises(ValueError, match=r"'nope' is unknown; available: .*bytegrad"):
        Algorithm.init("nope")
    with pytest.raises(TypeError, match="nope"):
        Algorithm.init("bytegrad", nope=1)
    with pytest.raises(ValueError, match="hierarchical"):
        Algorithm.init("bytegrad", hierarchical="yes")
    with pytest.raises(ValueError, match="already registered as ByteGradAlgorithm"):
        GlobalAlgorithmRegistry.register("bytegrad", Algorithm)
    with pytest.raises(TypeError, match="algorithm: expected a subclass"):
        GlobalAlgorithmRegistry.register("mine", int)  # type: ignore[arg-type]

    class Mine(Algorithm):
        pass

    with pytest.raises(TypeError, match=r"Mine has no counterpart .* bagua.Algorithm"):
        _ = Mine().core
    with pytest.raises(NotImplementedError, match=r"bagua\.Algorithm"):
        Mine().reify(None)
    with pytest.raises(TypeError, match="AlgorithmImpl is an AlgorithmImpl; give the Algorithm that reifies it"):
        as_core_algorithm(AlgorithmImpl(None))


@pytest.mark.process
def test_only_the_facade_patches() -> None:
    code = (
        "import bagua, bagua.engine, bagua.comm.communicator\n"
        "from torch import nn\n"
        "assert not any(name for name in dir(nn.Module) if 'bagua' in name)\n"
        "import torch\n"
        "assert not any(name for name in dir(torch.Tensor) if 'bagua' in name)\n"
        "import sys\n"
        "assert not any(name.startswith('bagua.torch_api') for name in sys.modules)\n"
        "import bagua.torch_api\n"
        "names = sorted(name for name in dir(nn.Module) if 'bagua' in name)\n"
        "want = ['algorithm', 'buckets', 'ddp', 'module_name', 'optimizers']\n"
        "assert names == [*('bagua_' + name for name in want), 'with_bagua']\n"
        "assert not hasattr(nn.Linear(1, 1), 'bagua_buckets')\n"
        "assert torch.ones(1).ensure_bagua_tensor('a').is_bagua_tensor()\n"
        "import threading\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def _examples(name: str, argv: list[str]) -> Any:
    import importlib

    return importlib.import_module(f"examples.{name}").main(argv)


@pytest.mark.parametrize("size", [1, 4])
def test_example_of_the_primitives(pool: RankPool, size: int) -> None:
    pool.run(size, _examples, "communication_primitives", [])


def test_example_script(pool: RankPool) -> None:
    losses = pool.run(2, _examples, "compat_script", ["--epochs", "2"])
    assert losses[0] == losses[1]
    assert losses[0][1] < 0.5 * losses[0][0]


class _Broken(nn.Module):
    """The compiler takes what is before the break and what is behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.second(hidden)


def _compiled_beside_the_patch() -> None:
    import bagua.torch_api  # noqa: F401

    torch.manual_seed(0)
    model = _Broken()
    x = torch.randn(5, 6)
    assert torch.allclose(torch.compile(model, backend="aot_eager")(x), model(x), atol=1e-6)


def test_modules_that_are_not_distributed_can_be_compiled(pool: RankPool) -> None:
    pool.run(1, _compiled_beside_the_patch)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_modules_can_be_scripted_and_traced_beside_the_patch() -> None:
    """TorchScript compiles the properties of modules."""
    import bagua.torch_api as api

    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    assert hasattr(model, "with_bagua") and api.__name__ == "bagua.torch_api"
    for made in (torch.jit.script(model), torch.jit.trace(model, x)):
        assert torch.equal(made(x), model(x))
