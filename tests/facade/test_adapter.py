"""Algorithms written for Bagua 0.9 train as those of this package do, and as their formulas say."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from tests.rank_pool import RankPool

STEPS = 6


def _model(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 10, bias=False), nn.Tanh(), nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 4))


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 2, generator=generator), torch.randn(4, 4, generator=generator)


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs, target = _batch(step, rank)
    return nn.functional.mse_loss(model(inputs), target)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, set_to_none: bool = True, steps: Sequence[int] = range(STEPS)
) -> torch.Tensor:
    for step in steps:
        optimizer.zero_grad(set_to_none=set_to_none)
        _loss(model, step, dist.get_rank()).backward()
        optimizer.step()
    return _weights(model)


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def _against(name: str, options: dict[str, Any], make: Callable[[], Any], seen: list[Any], **how: Any) -> torch.Tensor:
    """Train with `make()`'s algorithm and with `name` of this package; the same bits on this rank."""
    import bagua.torch_api

    ours, theirs = _model(dist.get_rank()), _model(dist.get_rank())
    keys = list(theirs.state_dict())
    one, other = (torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9) for model in (ours, theirs))
    bagua.distribute(ours, one, name, **options)
    assert theirs.with_bagua([other], make(), do_flatten=how.pop("do_flatten", True)) is theirs
    expected, got = _train(ours, one), _train(theirs, other, **how)
    assert torch.equal(got, expected), f"{name} {options} {how}: {(got - expected).abs().max()}"
    assert list(theirs.state_dict()) == keys
    seen.append(theirs.bagua_algorithm)
    return got


def _the_same_bits() -> list[list[float]]:
    from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
    from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithmImpl
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
    from tests.facade.old_style import MeanOfGradients, PeerWeights, RingOfDifferences

    def reified(kind: Any) -> Any:
        declared = type("Own", (Algorithm,), {"reify": lambda self, group: kind(group, hierarchical=False)})
        return declared()

    impls: list[Any] = []
    weights = [
        _against("gradient_allreduce", {}, MeanOfGradients, impls),
        _against("gradient_allreduce", {}, MeanOfGradients, impls, set_to_none=False),
        _against("gradient_allreduce", {}, MeanOfGradients, impls, do_flatten=False),
        _against("gradient_allreduce", {"average": False}, lambda: MeanOfGradients(average=False), impls),
        _against("gradient_allreduce", {"hierarchical": True}, lambda: MeanOfGradients(True), impls),
        _against("bytegrad", {"hierarchical": False}, lambda: MeanOfGradients(compression="MinMaxUInt8"), impls),
        _against("decentralized", {"hierarchical": False}, PeerWeights, impls),
        _against("decentralized", {"hierarchical": True}, lambda: PeerWeights(hierarchical=True), impls),
        _against(
            "decentralized",
            {"peer_selection_mode": "shift_one", "communication_interval": 2, "hierarchical": False},
            lambda: PeerWeights("shift_one", 2),
            impls,
        ),
        _against("low_precision_decentralized", {"hierarchical": False}, RingOfDifferences, impls),
        _against(
            "low_precision_decentralized",
            {"hierarchical": True, "communication_interval": 2},
            lambda: RingOfDifferences(interval=2, hierarchical=True),
            impls,
        ),
    ]
    _against("gradient_allreduce", {}, lambda: reified(GradientAllReduceAlgorithmImpl), impls)
    _against("bytegrad", {"hierarchical": False}, lambda: reified(ByteGradAlgorithmImpl), impls)
    assert all(isinstance(impl, AlgorithmImpl) for impl in impls)
    return [each.tolist() for each in weights]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1]], ids=["two ranks", "two nodes"])
def test_old_style_algorithms_train_as_ours(pool: RankPool, nodes: list[int]) -> None:
    ranks = pool.run(len(nodes), _the_same_bits, nodes=nodes)
    for synchronous in range(6):
        assert all(rank[synchronous] == ranks[0][synchronous] for rank in ranks)
    assert ranks[0][8] != ranks[1][8], "gossip with one peer at a time and every second step"


def _oracle(size: int, warmup: int) -> torch.Tensor:
    """The tutorial's formulas, one process for all ranks: their weights are equal."""
    model = _model(0)
    params = list(model.parameters())
    m, v = ([torch.zeros_like(param) for param in params] for _ in range(2))
    beta1, beta2, eps, lr = 0.9, 0.99, 0.1, 0.1
    for step in range(STEPS):
        grads = [torch.autograd.grad(_loss(model, step, rank), params) for rank in range(size)]
        mean = [torch.stack(each).mean(0) for each in zip(*grads, strict=True)]
        for index, param in enumerate(params):
            if step < warmup:
                m[index] = beta1 * m[index] + (1 - beta1) * mean[index]
                v[index] = beta2 * v[index] + (1 - beta2) * mean[index] ** 2
            else:
                own = [beta1 * m[index] + (1 - beta1) * rank[index] for rank in grads]
                m[index] = torch.stack(own).mean(0)
            with torch.no_grad():
                param -= lr * m[index] / (v[index].sqrt() + eps)
    return _weights(model)


def _tutorial(compression: str | None, warmup: int) -> tuple[list[float], int, str]:
    from tests.facade.old_style import MomentaInEightBits, TwoStageAdam

    model = _model(dist.get_rank())
    optimizer = TwoStageAdam(model.parameters(), lr=0.1, warmup_steps=warmup)
    model.with_bagua([optimizer], MomentaInEightBits(optimizer, compression=compression))
    _train(model, optimizer, steps=range(STEPS))
    stats = bagua.stats(model)
    assert stats.steps == STEPS and model.bagua_ddp.bagua_train_step_counter == STEPS
    return _weights(model).tolist(), stats.last.bytes_sent, stats.algorithm


def test_the_algorithm_of_the_tutorial(pool: RankPool) -> None:
    size, warmup = 3, 3
    oracle = _oracle(size, warmup)
    exact = pool.run(size, _tutorial, None, warmup)
    small = pool.run(size, _tutorial, "MinMaxUInt8", warmup)
    for results, tolerance in ((exact, 1e-6), (small, 2e-3)):
        assert all(weights == results[0][0] for weights, *_ in results), "replicas stay equal"
        assert torch.allclose(torch.tensor(results[0][0]), oracle, atol=tolerance, rtol=0)
    assert not torch.allclose(torch.tensor(small[0][0]), oracle, atol=1e-6, rtol=0)
    assert 3 * small[0][1] < exact[0][1], "bytes of the last step"
    assert "old_style.MomentaInEightBits(compression='MinMaxUInt8', hierarchical=False)" in small[0][2]


class _Partly(nn.Module):
    """Its second layer has no gradient on odd ranks, and its scale lies directly on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first, self.second = nn.Linear(2, 4), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = self.second(x) if dist.get_rank() % 2 == 0 else 0.0
        return (self.first(x) + extra) * self.scale


def _unused_and_accumulated() -> tuple[list[float], int]:
    from tests.facade.old_style import MeanOfGradients

    torch.manual_seed(0)
    model: Any = _Partly()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], MeanOfGradients())
    assert next(name for name, _ in model.bagua_ddp.bagua_build_params()) == "scale"
    for step in range(3):
        optimizer.zero_grad()
        with bagua.no_sync(model):
            _loss(model, step, dist.get_rank()).backward()
        _loss(model, step + 10, dist.get_rank()).backward()
        optimizer.step()
        assert model.bagua_ddp.bagua_train_step_counter == step + 1, "two forward passes are one step"
    plain = pickle.loads(pickle.dumps(model))
    assert torch.equal(_weights(plain), _weights(model)) and not hasattr(copy.deepcopy(model), "bagua_algorithm")
    assert not plain.scale.is_bagua_tensor() and model.scale.is_bagua_tensor()
    torch.save(model, buffer := io.BytesIO())
    assert buffer.tell() > 0
    (bucket,) = model.bagua_buckets
    assert bucket.check_flatten() and bucket.bytes() == 4 * (1 + 12 + 12)
    assert bucket.padding_tensor is not None and bucket.flattened_tensor().numel() == 26
    return _weights(model).tolist(), bagua.stats(model).steps


def test_parameters_without_a_gradient_hold_nothing_up(pool: RankPool) -> None:
    (first, steps), (second, _) = pool.run(2, _unused_and_accumulated)
    torch.manual_seed(0)
    expected = _weights(_Partly())
    assert first == second and steps == 3
    assert not torch.equal(torch.tensor(first), expected)


def _switch_and_load() -> None:
    from bagua.torch_api.algorithms import Algorithm
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
    from tests.facade.old_style import MeanOfGradients, MomentaInEightBits, PeerWeights, TwoStageAdam

    rank = dist.get_rank()
    model = _model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], PeerWeights("shift_one", 3))
    _train(model, optimizer, steps=range(2))
    saved = bagua.state_dict(model)
    bagua.load_state_dict(model, saved)
    _train(model, optimizer, steps=range(2, 4))
    before = _weights(model)
    gathered = [torch.empty_like(before) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, before)
    assert not torch.equal(gathered[0], gathered[1])

    class Refused(PeerWeights):
        def reify(self, process_group: Any) -> Any:
            impl = super().reify(process_group)

            def init_operations(bagua_ddp: Any, bucket: Any) -> None:
                bucket.append_asynchronous_model_average_op("all", group=process_group)

            impl.init_operations = init_operations
            return impl

    with pytest.raises(NotImplementedError, match=r"use AsyncModelAverageAlgorithm, or write a bagua\.Algorithm"):
        model.with_bagua([optimizer], Refused())
    _train(model, optimizer, steps=range(4, 6))  # with the algorithm that was there
    model.with_bagua([optimizer], MeanOfGradients())  # the mean of the ranks' weights becomes everyone's
    after = _weights(model)
    dist.all_gather(gathered, after)
    assert torch.equal(gathered[0], gathered[1])
    assert not bagua.stats(model).notices
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    assert isinstance(model.bagua_algorithm, Algorithm) and not model.bagua_buckets
    assert not hasattr(model, "bagua_ddp")
    with pytest.raises(bagua.RankMismatchError, match="average=False"):
        model.with_bagua([optimizer], MeanOfGradients(average=rank == 0))
    adam = TwoStageAdam(model.parameters(), lr=0.1, warmup_steps=1)
    model.with_bagua([adam], MomentaInEightBits(adam, hierarchical=True))
    _train(model, adam, steps=range(3))
    assert any("nothing is compressed" in notice for notice in bagua.stats(model).notices)


def _reset() -> None:
    from tests.facade.old_style import PeerWeights, PeerWeightsImpl

    class Impl(PeerWeightsImpl):
        """Marks nothing, so that ranks train apart."""

        def need_reset(self) -> bool:
            return self.ddp.bagua_train_step_counter == 3

        def init_tensors(self, bagua_ddp: Any) -> Any:
            self.ddp = bagua_ddp
            return super().init_tensors(bagua_ddp)

        def due(self, bagua_ddp: Any) -> bool:
            return False

    class Own(PeerWeights):
        def reify(self, process_group: Any) -> Any:
            return Impl(process_group, self)

    model, rank = _model(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], Own())
    for step in range(4):
        mine = _train(model, optimizer, steps=[step])
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, mine)
        assert not torch.equal(ranks[0], ranks[1])
        if step == 1:
            _loss(model, 7, rank)
            weights = _weights(model)
            assert torch.equal(weights, ranks[0]), "the third step begins with a reset"


def test_a_reset_gives_everyone_the_weights_of_rank_0(pool: RankPool) -> None:
    pool.run(2, _reset)


def test_switch_load_and_refusals(pool: RankPool) -> None:
    pool.run(2, _switch_and_load)


def _wrong_uses() -> None:
    from bagua.torch_api import new_group
    from bagua.torch_api.algorithms import AlgorithmImpl
    from tests.facade.old_style import MeanOfGradients, MeanOfGradientsImpl

    def distributed(module: Any = None, **methods: Any) -> tuple[Any, torch.optim.Optimizer]:
        impl = type("Impl", (MeanOfGradientsImpl,), methods)

        class Own(MeanOfGradients):
            def reify(self, process_group: Any) -> Any:
                return impl(process_group, self)

        model = _model() if module is None else module
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model.with_bagua([optimizer], Own()), optimizer

    def one_is_never_marked(self: Any, bagua_ddp: Any) -> Any:
        return lambda name, param: None if name == "2.bias" else param.bagua_mark_communication_ready()

    model, optimizer = distributed(init_backward_hook=one_is_never_marked)
    with pytest.raises(
        RuntimeError, match=r"'4.bias' is marked ready again.* bucket '0' comes first and waits for 2.bias"
    ):
        _train(model, optimizer, steps=range(2))

    def fails(self: Any, bagua_ddp: Any, bucket: Any) -> None:
        bucket.append_python_op(lambda name: 1 // 0)

    model, optimizer = distributed(init_operations=fails)
    with pytest.raises(bagua.CommunicationError, match="ZeroDivisionError"):
        _train(model, optimizer, steps=range(1))

    group = new_group([0])

    def elsewhere(self: Any, bagua_ddp: Any, bucket: Any) -> None:
        bucket.append_centralized_synchronous_op(group=group)

    with pytest.raises(NotImplementedError, match=r"group of ranks \[0\].*with_bagua\(process_group="):
        distributed(init_operations=elsewhere)
    with pytest.raises(TypeError, match="init_tensors: expected Bagua tensors"):
        distributed(init_tensors=lambda self, ddp: [torch.ones(2)])
    with pytest.raises(TypeError, match="tensors_to_buckets: expected a list of BaguaBucket"):
        distributed(tensors_to_buckets=lambda self, tensors, do_flatten: [])
    with pytest.raises(TypeError, match="reify"):
        _model().with_bagua([], type("Nothing", (MeanOfGradients,), {"reify": lambda self, group: None})())
    with pytest.raises(ValueError, match=r"'weight' has sparse gradients.*sparse=False"):
        distributed(nn.Embedding(3, 2, sparse=True))
    with pytest.raises(TypeError, match="is an AlgorithmImpl; give the Algorithm"):
        _model().with_bagua([], AlgorithmImpl(None))
    model, optimizer = distributed()
    with pytest.raises(ValueError, match=r"algorithms written for Bagua 0\.9"), bagua.join(model):
        pass


def test_wrong_uses_say_what_to_do(pool: RankPool) -> None:
    pool.run(2, _wrong_uses)


def _alone() -> list[float]:
    from tests.facade.old_style import MeanOfGradients, MomentaInEightBits, PeerWeights, RingOfDifferences, TwoStageAdam

    plain, reference = _model(), torch.optim.SGD
    expected = _train(plain, reference(plain.parameters(), lr=0.2))
    for algorithm in (MeanOfGradients(), PeerWeights(hierarchical=True), RingOfDifferences("all")):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        assert torch.equal(_train(model.with_bagua([optimizer], algorithm), optimizer), expected)
    model = _model(0)
    adam = TwoStageAdam(model.parameters(), lr=0.1, warmup_steps=2)
    return _train(model.with_bagua([adam], MomentaInEightBits(adam)), adam).tolist()


def test_a_single_rank(pool: RankPool) -> None:
    (weights,) = pool.run(1, _alone)
    assert torch.allclose(torch.tensor(weights), _oracle(1, 2), atol=1e-6, rtol=0)
