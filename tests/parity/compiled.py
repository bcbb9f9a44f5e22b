"""Rows: other ways through autograd."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bagua
from bagua.engine.api import live_engines
from bagua.engine.engine import Engine
from tests.parity.case import FEW, NAMES, Case
from tests.parity.feature import Refused, feature, says
from tests.parity.model import STEPS, Branches, Small, batch, loss_of, target, train, weights

SECTION = "Compilation, checkpointing and other ways through autograd"
# Traces with dynamo and AOT autograd, as every backend; generates no code, which would take long.
BACKEND = "aot_eager"
DAILY = ("gradient_allreduce", "decentralized")  # to trace takes seconds


class Block(nn.Module):
    """One part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Blocks(nn.Module):
    """A chain of equal parts, each of which may be compiled or checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def slack(case: Case) -> float:
    """Compiled gradients come in another order, so buckets and with them what a codec loses are others."""
    return 0.0 if case.slack < 1e-3 else 0.9


@feature(SECTION, "`torch.compile` of the module after `distribute`, `fullgraph=True`", daily=DAILY)
def compile_after(case: Case) -> None:
    """The hooks are traced to nothing; what they do is done when the backward pass begins."""
    torch._dynamo.reset()
    model, optimizer = case.build(Blocks)
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
    train(model, optimizer, backward=lambda step: loss_of(compiled, step).backward())
    assert bagua.stats(model).steps == STEPS
    case.check_same_run(model, make=Blocks, slack=slack(case))


@feature(SECTION, "`torch.compile` before `distribute`, of the whole module, with its buffers broadcast", daily=DAILY)
def compile_before(case: Case) -> None:
    """Hooks run around what was compiled; keys are those of the compiled module."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Blocks()
    plain.register_buffer("number", torch.full((), float(dist.get_rank())))
    model = torch.compile(plain, backend=BACKEND, fullgraph=True)
    optimizer = case.optimizer(plain.parameters())
    case.distribute(model, optimizer, broadcast_buffers=case.synchronous)
    train(model, optimizer)
    case.check_same_run(model, make=Blocks, slack=slack(case))
    assert float(plain.number) == 0.0
    bagua.detach(model)
    if case.synchronous:  # and the other way round it is refused, not forgotten
        case.distribute(plain, optimizer, broadcast_buffers=True)
        compiled = torch.compile(plain, backend=BACKEND)
        says(RuntimeError, "broadcast_buffers=True", "compiled", run=lambda: loss_of(compiled, 0).backward())


@feature(SECTION, "`torch.compile` by region: buckets leave while the backward pass still runs", daily=DAILY)
def compile_regions(case: Case) -> None:
    """Each compiled block hands its gradients over when it is done."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Blocks()
    for block in model.blocks:
        block.compile(backend=BACKEND, fullgraph=True)
    optimizer = case.optimizer(model.parameters())
    case.distribute(model, optimizer, bucket_bytes=1)
    engine = engine_of(model)
    left: list[int] = []
    handle = model.first.weight.register_hook(lambda _: left.append(engine.reducer._next))
    train(model, optimizer)
    handle.remove()
    assert left[0] == 0 or not case.shares_gradients, "their order was not known yet"
    assert all(number >= 6 for number in left[1:]), f"{left} buckets had left before the first layer"
    case.check_agreement(model)


@feature(SECTION, "activation checkpointing, reentrant or not")
def checkpointing(case: Case) -> None:
    """As without, to the last bit."""
    for reentrant in (True, False):
        model, optimizer = case.build(lambda reentrant=reentrant: Blocks(reentrant))
        train(model, optimizer)
        case.check_same_run(model, exactly=True, make=Blocks)
        bagua.detach(model)


class Shared(nn.Module):
    """One block, used several times, in reentrant checkpoints: its gradient comes in several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.never, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(3):
            x = checkpoint(self.block, x.tanh(), use_reentrant=True)
        return self.last(x)


@feature(SECTION, "`static_graph=True`: shared weights in reentrant checkpoints, no questions about unused parameters")
def static_graph(case: Case) -> None:
    """As without checkpoints; and the store is not asked after the first passes."""
    model, optimizer = case.build(Shared, static_graph=True, bucket_bytes=1)
    engine = engine_of(model)
    asked: list[int] = []
    union = engine.reducer._usage.union
    engine.reducer._usage.union = lambda number, used: asked.append(number) or union(number, used)
    train(model, optimizer)
    assert bagua.stats(model).steps == STEPS
    assert len(asked) <= 1, f"asked at passes {asked}"
    case.check_agreement(model)
    assert not torch.equal(model.block.weight, case.start(Shared)["block.weight"])
    if case.name == "gradient_allreduce":
        torch.manual_seed(0)
        twin = Shared()
        adam = case.optimizer(twin.parameters())
        for step in range(STEPS):
            adam.zero_grad()
            parts = [(twin(batch(step, rank)) - target(step, rank)).square().mean() for rank in range(2)]
            (sum(parts) / 2).backward()
            adam.step()
        for name, value in weights(twin).items():
            assert torch.allclose(model.get_parameter(name), value, atol=1e-5), name


@feature(SECTION, "`static_graph=True`, and then other parameters are used: an error", daily=FEW)
def static_graph_broken(case: Case) -> None:
    """Names them."""
    model, optimizer = case.build(Branches, static_graph=True)
    train(model, optimizer, range(2), lambda step: loss_of(model, step, [0, 2]).backward())
    optimizer.zero_grad()
    loss = loss_of(model, 2, [1, 2])
    says(RuntimeError, "static_graph=True", "branches.0.weight", "branches.1.weight", run=loss.backward)


@feature(SECTION, "`torch.autograd.grad` through the module, a gradient penalty: not taken for a backward pass")
def gradient_penalty(case: Case) -> None:
    """Nothing is exchanged for it; the backward pass through it is an ordinary one."""
    model, optimizer = case.build()
    train(model, optimizer, range(2))

    def backward(step: int) -> None:
        x = batch(step).requires_grad_()
        out = model(x)
        before = bagua.stats(model).total.launches
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        torch.autograd.grad(out.sum(), model.last.weight, retain_graph=True)
        assert bagua.stats(model).total.launches == before
        ((out - target(step)).square().mean() + 0.1 * slope.square().mean()).backward()

    train(model, optimizer, range(2, STEPS), backward)
    assert isinstance(model, Small) and bagua.stats(model).steps == STEPS
    case.check_agreement(model)


@feature(SECTION, "a model trained in evaluation mode (fixed batch statistics)", daily=FEW)
def evaluation_mode(case: Case) -> None:
    """As in training mode, where nothing depends on it."""
    model, optimizer = case.build()
    model.eval()
    train(model, optimizer)
    assert bagua.stats(model).steps == STEPS
    case.check_same_run(model)


@feature(SECTION, "capture in a CUDA graph", refused=dict.fromkeys(NAMES, "CUDA graphs: .*cannot be captured"))
def cuda_graphs(case: Case) -> None:
    """Here with a stream that only says that it captures; on a GPU in `tests/engine/test_gpu.py`."""
    model, optimizer = case.build()
    train(model, optimizer, [0])
    inventory = engine_of(model).inventory  # the engine's parts share it
    object.__setattr__(inventory, "device", torch.device("cuda"))
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        said = says(RuntimeError, "CUDA graphs", run=lambda: loss_of(model, 1))
    object.__setattr__(inventory, "device", torch.device("cpu"))
    train(model, optimizer, range(1, STEPS))
    case.check_same_run(model, exactly=True)
    raise Refused(said)


@feature(
    SECTION,
    "compiled autograd: `backward()` within a compiled step, with `torch._dynamo.config.compiled_autograd`",
    refused=dict.fromkeys(NAMES, "^compiled autograd: .*torch.compile of the module compiles the backward pass"),
    daily=DAILY[:1],
)
def compiled_autograd(case: Case) -> None:
    """Before any exchange has begun, so training can go on. With the setting alone, outside of such a step, it works.

    The message is the same if the context manager of compiled autograd is used.
    """
    from torch._dynamo.compiled_autograd import _enable  # here, as it takes a second to import

    torch._dynamo.reset()
    model, optimizer = case.build()
    with torch._dynamo.config.patch(compiled_autograd=True):
        train(model, optimizer, [0])
        step = torch.compile(lambda number: loss_of(model, number).backward(), backend="eager")
        said = says(RuntimeError, "compiled autograd", run=lambda: step(1))
    loss = loss_of(model, 1)
    with _enable(torch.compile(backend="eager")):
        assert said == says(RuntimeError, run=loss.backward)
    train(model, optimizer, range(1, STEPS))
    case.check_same_run(model, exactly=True)
    raise Refused(said)


def engine_of(model: Any) -> Engine:
    """What works behind it."""
    return next(each for each in live_engines() if each.inventory.trainable["last.bias"] is model.last.bias)
