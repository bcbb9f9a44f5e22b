"""Wrong arguments: a clear error on every rank, before anything hangs."""

from __future__ import annotations

import inspect
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from bagua.engine.startup.options import OF_DDP, OWN
from tests.engine.training import Net, seeded
from tests.rank_pool import RankPool


def model_and_optimizer(make: Any = Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make() if make is not Net else seeded(Net, 0)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def message_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def sparse_embedding() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential()
    model.tokens = nn.Embedding(3, 2, sparse=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def with_expanded_buffer(module: nn.Module) -> nn.Module:
    """Dimensions of size 1 that are expanded, as of Hugging Face's position ids, share nothing."""
    module.register_buffer("positions", torch.arange(3).expand(1, -1))
    module.register_buffer("table", torch.randn(1, 3).expand(2, 3))
    return module


def expanded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    model.offset = nn.Parameter(torch.zeros(1).expand(4))
    return model, torch.optim.SGD([model.weight], lr=0.1)


class Autoencoder(nn.Module):
    """The decoder's weight is a view of the encoder's, all of it or two columns."""

    def __init__(self, columns: int = 6, frozen: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, columns)
        self.decoder.weight.data = self.encoder.weight.data.t()[:columns]
        self.decoder.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


CASES: dict[str, tuple[Any, str]] = {
    "algorithm": (
        lambda m, o: bagua.distribute(m, o, "gradient_alreduce"),
        "ValueError: .*'gradient_alreduce'.*bytegrad",
    ),
    "algorithm type": (lambda m, o: bagua.distribute(m, o, 3), "TypeError: algorithm: .*int"),
    "option": (
        lambda m, o: bagua.distribute(m, o, "bytegrad", bits=4),
        "ValueError: .*'bytegrad'.*'bits'.*hierarchical",
    ),
    "argument of DDP": (
        lambda m, o: bagua.distribute(m, o, bucket_cap_mb=25),
        r"ValueError: bucket_cap_mb: an argument of DistributedDataParallel.* bucket_bytes.*docs/from-ddp\.md",
    ),
    "argument of DDP, beside instance": (
        lambda m, o: bagua.distribute(m, o, bagua.algorithms.ByteGrad(), find_unused_parameters=True),
        "ValueError: find_unused_parameters: an argument of DistributedDataParallel.* leave it out",
    ),
    "misspelt argument": (
        lambda m, o: bagua.distribute(m, o, "bytegrad", bucket_byte=2**20),
        "ValueError: .*'bytegrad'.*'bucket_byte'.*takes: process_group, .*did you mean 'bucket_bytes'",
    ),
    "option value": (lambda m, o: bagua.distribute(m, o, average="yes"), "ValueError: .*'average'.*'yes'"),
    "option beside instance": (
        lambda m, o: bagua.distribute(m, o, bagua.algorithms.ByteGrad(), hierarchical=True),
        "ValueError: .*hierarchical.*ByteGrad",
    ),
    "codec": (lambda m, o: bagua.distribute(m, o, "bytegrad", codec="int3"), "ValueError: .*'int3'.*minmax_uint8"),
    "codec and feedback": (
        lambda m, o: bagua.distribute(m, o, "bytegrad", codec="bf16", error_feedback=True),
        "ValueError: .*error_feedback.*'bf16'",
    ),
    "bucket_bytes": (lambda m, o: bagua.distribute(m, o, bucket_bytes=0), "ValueError: bucket_bytes: .*0"),
    "bucket_bytes type": (lambda m, o: bagua.distribute(m, o, bucket_bytes=1e6), "TypeError: bucket_bytes: .*float"),
    "module": (lambda m, o: bagua.distribute(o, o), "TypeError: module: .*SGD"),
    "optimizer": (lambda m, o: bagua.distribute(m, [m]), "TypeError: optimizers: .*Net"),
    "wrapper of an optimizer": (
        lambda m, o: bagua.distribute(m, SimpleNamespace(opt=o)),  # pyright: ignore[reportArgumentType]
        r"TypeError: optimizers: .*SimpleNamespace; pass the wrapped optimizer, its \.opt",
    ),
    "foreign optimizer": (
        lambda m, o: bagua.distribute(m, [o, torch.optim.Adam(nn.Linear(2, 2).parameters())]),
        r"ValueError: optimizers: number 1 \(Adam\)",
    ),
    "nothing to train": (
        lambda m, o: bagua.distribute(m.requires_grad_(False), o),
        "ValueError: .*Net has no parameter that requires a gradient",
    ),
    "meta": (lambda m, o: bagua.distribute(m.to("meta"), o), "ValueError: parameter 'scale' is on the meta device"),
    "expanded buffer": (
        lambda m, o: bagua.distribute(with_expanded_buffer(m), o),
        "ValueError: buffer 'table' is an expanded view",
    ),
    "expanded parameter": (
        lambda m, o: bagua.distribute(*expanded()),
        r"ValueError: parameter 'offset' is an expanded view, .*nn.Parameter\(x.clone\(\)\)",
    ),
    "tied memory": (
        lambda m, o: bagua.distribute(*model_and_optimizer(Autoencoder), "local_sgd"),
        "ValueError: parameters 'encoder.weight' and 'decoder.weight' share memory, and 'local_sgd' exchanges weights",
    ),
    "partly tied memory": (
        lambda m, o: bagua.distribute(*model_and_optimizer(partial(Autoencoder, columns=2)), "diloco"),
        "ValueError: parameters 'encoder.weight' and 'decoder.weight' share memory, and 'diloco' exchanges weights",
    ),
    "memory of a frozen parameter": (
        lambda m, o: bagua.distribute(*model_and_optimizer(partial(Autoencoder, frozen=True)), "async"),
        "ValueError: parameters 'encoder.weight' and 'decoder.weight' share memory, and 'async' exchanges weights",
    ),
    "tied memory, fallback": (
        lambda m, o: bagua.distribute(
            *model_and_optimizer(Autoencoder), "bytegrad", guard=bagua.Guard(every=2, fallback="local_sgd")
        ),
        "ValueError: parameters 'encoder.weight' and 'decoder.weight' share memory, and 'local_sgd' exchanges weights",
    ),
    "lazy": (lambda m, o: bagua.distribute(nn.LazyLinear(2), o), "ValueError: parameter 'weight' is not initialised"),
    "complex": (lambda m, o: bagua.distribute(Complex(), o), "ValueError: parameter 'phase' is torch.complex64"),
    "sparse": (
        lambda m, o: bagua.distribute(
            *sparse_embedding(), bagua.algorithms.Warmup(2, "gradient_allreduce", "local_sgd")
        ),
        "ValueError: .*'tokens.weight' has sparse gradients.*gradients first and weights later",
    ),
    "broadcast_buffers": (
        lambda m, o: bagua.distribute(m, o, "async", broadcast_buffers=True),
        "ValueError: broadcast_buffers: .*'async'",
    ),
    "broadcast_buffers type": (
        lambda m, o: bagua.distribute(m, o, broadcast_buffers=1),
        "TypeError: broadcast_buffers: .*1",
    ),
    "static_graph type": (lambda m, o: bagua.distribute(m, o, static_graph="yes"), "TypeError: static_graph: .*'yes'"),
    "group": (lambda m, o: bagua.distribute(m, o, process_group="world"), "TypeError: process_group: .*str"),
    "detach": (lambda m, o: bagua.detach(m), "ValueError: Net is not distributed"),
    "stats": (lambda m, o: bagua.stats(m), "ValueError: Net is not distributed"),
    "join": (lambda m, o: bagua.join(m).__enter__(), "ValueError: join: Net is not distributed"),
    "no_sync": (lambda m, o: bagua.no_sync(m).__enter__(), "ValueError: Net is not distributed"),
    "state_dict": (lambda m, o: bagua.state_dict(m), "ValueError: Net is not distributed"),
}


def on_two_ranks(name: str) -> tuple[str, str]:
    """The message on a wrong call, and what happens when only rank 1 makes it."""
    everywhere = message_of(lambda: CASES[name][0](*model_and_optimizer()))
    model, optimizer = model_and_optimizer()
    if name in ("detach", "join", "stats", "no_sync", "state_dict", "group"):
        return everywhere, "not collective"
    wrong = dist.get_rank() == 1
    alone = message_of(lambda: CASES[name][0](model, optimizer) if wrong else bagua.distribute(model, optimizer))
    # Nothing is left behind: the same ranks go on.
    model, optimizer = model_and_optimizer()
    bagua.distribute(model, optimizer)
    return everywhere, alone


@pytest.mark.parametrize("name", CASES)
def test_message(pool: RankPool, name: str) -> None:
    pattern = CASES[name][1]
    for rank, (everywhere, alone) in enumerate(pool.run(2, on_two_ranks, name)):
        assert re.match(pattern, everywhere, re.S), everywhere
        if alone != "not collective":
            assert re.match(pattern if rank == 1 else "RankMismatchError: rank 1 cannot .*", alone, re.S), alone


def test_before_init_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"bagua\.init_process_group\(\)"):
        bagua.distribute(*model_and_optimizer())


def test_environment_variable(monkeypatch: pytest.MonkeyPatch, pool: RankPool) -> None:
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "10M")
    bagua.init_process_group()
    try:
        with pytest.raises(ValueError, match="BAGUA_DEFAULT_BUCKET_SIZE.*10M"):
            bagua.distribute(*model_and_optimizer())
        monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "256")
        model, optimizer = model_and_optimizer()
        bagua.distribute(model, optimizer)
        model(torch.randn(4, 6)).sum().backward()
        assert bagua.stats(model).num_buckets > 1
    finally:
        bagua.destroy_process_group()


class Cuts(nn.Module):
    """Parameters that lie in one storage and share nothing: ranges of it, and columns of which ranges overlap."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(40)
        columns = flat[20:].view(4, 5)
        self.first, self.second = nn.Parameter(flat[:12].view(3, 4)), nn.Parameter(flat[12:20])
        self.left, self.right = nn.Parameter(columns[:, :2]), nn.Parameter(columns[:, 2:])
        frozen = torch.randn(6)
        self.frozen, self.again = (nn.Parameter(frozen, requires_grad=False) for _ in range(2))
        self.none, self.nothing = nn.Parameter(flat[:0]), nn.Parameter(flat[:0])


def test_parameters_of_one_storage() -> None:
    bagua.init_process_group()
    try:
        model, optimizer = model_and_optimizer(Cuts)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        bagua.distribute(model, optimizer, "local_sgd")
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.detach(), before[name], rtol=0, atol=0)
        bagua.distribute(*model_and_optimizer(Autoencoder), "bytegrad")  # gradients: tied weights stay tied
    finally:
        bagua.destroy_process_group()


def differ(what: str) -> str:
    rank = dist.get_rank()
    model, options = seeded(Net, 0), {}
    if what == "shape" and rank == 2:
        model.inner[2] = nn.Linear(5, 5, bias=False)
        model.first = nn.Linear(7, 5)
    elif what == "number" and rank == 1:
        model.extra = nn.Linear(2, 2)
    elif what == "dtype" and rank == 2:
        model.last.double()
    elif what == "frozen" and rank == 1:
        model.last.bias.requires_grad_(False)
    elif what == "buffer" and rank == 1:
        model.register_buffer("more", torch.zeros(2))
    elif what == "bucket_bytes" and rank == 1:
        options["bucket_bytes"] = 77
    elif what == "algorithm" and rank == 2:
        options["algorithm"] = "bytegrad"
    kind = torch.optim.Adam if what == "optimizer" and rank == 1 else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    return message_of(lambda: bagua.distribute(model, optimizer, **options))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", ["'first.weight'", "[5x7]", "rank 2", "[5x6]", "rank 0"]),
        ("number", ["rank 1", "'extra.weight'"]),
        ("dtype", ["'last.weight'", "float64", "rank 2", "float32"]),
        ("frozen", ["rank 1", "'last.bias'"]),
        ("buffer", ["rank 1", "buffer 'more'"]),
        ("bucket_bytes", ["bucket_bytes", "rank 1", "77"]),
        ("algorithm", ["algorithm", "rank 2", "ByteGrad"]),
        ("optimizer", ["optimizers", "rank 1", "Adam of 1"]),
    ],
)
def test_ranks_that_differ(pool: RankPool, what: str, words: list[str]) -> None:
    for message in pool.run(3, differ, what):
        assert message.startswith("RankMismatchError: ")
        assert all(word in message for word in words), message


def unfreeze() -> str:
    model, optimizer = seeded(Net, 0), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer)
    model(torch.randn(4, 6)).sum().backward()
    model.frozen.requires_grad_(True)
    message = message_of(lambda: model(torch.randn(4, 6)))
    bagua.distribute(model, optimizer)
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))).sum().backward()
    total = model.frozen.weight.grad.clone()
    dist.all_reduce(total)
    assert torch.allclose(total, 2 * model.frozen.weight.grad)
    return message


def test_unfreezing_needs_distribute_again(pool: RankPool) -> None:
    for message in pool.run(2, unfreeze):
        assert message.startswith("RuntimeError: parameter 'frozen.weight' was frozen")


def test_arguments_of_distribute_and_of_ddp_are_known() -> None:
    of_ddp = set(inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    own = [
        each.name for each in inspect.signature(bagua.distribute).parameters.values() if each.kind is each.KEYWORD_ONLY
    ]
    assert list(OWN) == own
    assert of_ddp - {"module", *OWN} <= OF_DDP.keys()
