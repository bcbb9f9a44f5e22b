"""What cannot be combined with fault tolerance is refused by name, before anything is exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from bagua import algorithms
from bagua.algorithms import LostStep
from bagua.comm.team import Team
from bagua.engine.hooks import attachments
from bagua.engine.recovery import limits
from bagua.engine.recovery.limits import without_mixed_halves
from bagua.errors import RankMismatchError
from tests.engine.membership_store import serve_store
from tests.engine.scripted_seat import ScriptedSeat, view
from tests.rank_threads import run_teams, teams

LIMIT_S = 60.0


@pytest.fixture
def store() -> tuple[str, dist.TCPStore]:
    """As of a launcher, and its address."""
    return serve_store()


def tolerance(store: str, members: int = 1, rank: int = 0) -> tuple[ScriptedSeat, bagua.FaultTolerance]:
    """Options with an agent that agrees to everything."""
    seat = ScriptedSeat(view(1, *(f"n{place}" for place in range(members)), rank=rank, store=store))
    return seat, bagua.FaultTolerance(seat=seat, open_timeout_s=LIMIT_S)


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("name", ["open_timeout_s", "max_blocked_s"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "60", None, [1.0]])
def test_a_time_that_is_none(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected a positive number of seconds, got "):
        bagua.FaultTolerance(**{name: value})


@pytest.mark.parametrize(("value", "kind"), [(1, "int"), ("yes", "str"), ({"max_blocked_s": 60.0}, "dict")])
def test_neither_a_bool_nor_options(value: Any, kind: str) -> None:
    model, optimizer = small()
    with pytest.raises(TypeError, match=f"^fault_tolerant: expected True, False or bagua.FaultTolerance, got {kind}$"):
        bagua.distribute(model, optimizer, fault_tolerant=value)


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAGUA_SEAT", raising=False)
    assert not bagua.elastic.is_fault_tolerant()
    model, optimizer = small()
    for value in (True, bagua.FaultTolerance(max_blocked_s=5.0)):
        with pytest.raises(ValueError, match=r"^fault_tolerant: no launcher tells this rank .*`bagua run --fault-tol"):
            bagua.distribute(model, optimizer, fault_tolerant=value)


def test_a_script_can_ask_for_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_SEAT", "/a/socket")
    assert bagua.elastic.is_fault_tolerant()
    assert bagua.elastic.shield is bagua.elastic.ignore_sigterm


REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "process_group": lambda: {"process_group": teams(1)[0]},
    "guard": lambda: {"guard": bagua.Guard()},
    "broadcast_buffers": lambda: {"broadcast_buffers": True},
    "autotune": lambda: {"autotune": True},
    "rank_order": lambda: {"rank_order": [0]},
    "routes": lambda: {"routes": "measured"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_go_together(name: str, store: tuple[str, dist.TCPStore]) -> None:
    model, optimizer = small()
    before = [param.clone() for param in model.parameters()]
    seat, options = tolerance(store[0])
    with pytest.raises(ValueError, match=f"^{name}: not with fault_tolerant yet$"):
        bagua.distribute(model, optimizer, "bytegrad", fault_tolerant=options, **REFUSED[name]())
    assert model not in attachments and seat.asked == []
    model(torch.ones(1, 3)).sum().backward()  # a plain module
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    bagua.distribute(model, optimizer, "bytegrad", fault_tolerant=options)
    bagua.detach(model)


def test_nccl_is_for_gpus(store: tuple[str, dist.TCPStore]) -> None:
    model, optimizer = small()
    options = replace(tolerance(store[0])[1], backend="nccl")
    with pytest.raises(ValueError, match=r'^fault_tolerant: backend: "nccl" cannot be used: .* these are on cpu$'):
        bagua.distribute(model, optimizer, fault_tolerant=options)


@pytest.mark.parametrize("backend", ["mpi", "", None, 1])
def test_a_backend_that_there_is_not(backend: Any) -> None:
    with pytest.raises(ValueError, match=r"^backend: expected one of 'gloo', 'nccl', got "):
        bagua.FaultTolerance(backend=backend)


def test_ranks_with_different_backends_are_told(
    store: tuple[str, dist.TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "why_no_nccl", lambda device: None)

    def rank(team: Team) -> str:
        model, optimizer = small()
        options = replace(tolerance(store[0], 2, team.rank)[1], backend=("gloo", "nccl")[team.rank])
        with pytest.raises(RankMismatchError) as found:
            bagua.distribute(model, optimizer, fault_tolerant=options)
        return str(found.value)

    for message in run_teams(2, rank):
        assert "fault_tolerant" in message and "over gloo" in message and "over nccl" in message


def test_lbfgs(store: tuple[str, dist.TCPStore]) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"^optimizers: LBFGS evaluates the model within its step; not with fault_tol"):
        bagua.distribute(model, torch.optim.LBFGS(model.parameters()), fault_tolerant=tolerance(store[0])[1])


def test_a_second_call(store: tuple[str, dist.TCPStore]) -> None:
    model, optimizer = small()
    options = tolerance(store[0])[1]
    bagua.distribute(model, optimizer, "bytegrad", fault_tolerant=options)
    for again in (options, None):
        with pytest.raises(ValueError, match=r"^module: Linear is fault-tolerant, and keeps its algorithm"):
            bagua.distribute(model, optimizer, "gradient_allreduce", fault_tolerant=again)
    assert "ByteGrad" in bagua.stats(model).algorithm
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert bagua.stats(model).steps == 1
    bagua.detach(model)


def test_a_module_that_is_distributed_without_it(store: tuple[str, dist.TCPStore]) -> None:
    model, optimizer = small()
    bagua.distribute(model, optimizer, process_group=teams(1)[0])
    with pytest.raises(ValueError, match=r"^fault_tolerant: the module is distributed already; call bagua.detach"):
        bagua.distribute(model, optimizer, fault_tolerant=tolerance(store[0])[1])
    bagua.detach(model)


def test_another_module_of_the_process(store: tuple[str, dist.TCPStore]) -> None:
    """Nor the same one again: the agent goes on counting steps."""
    model, optimizer = small()
    options = tolerance(store[0])[1]
    bagua.distribute(model, optimizer, fault_tolerant=options)
    other, its_optimizer = small()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^fault_tolerant: a module of this process was given it before"):
            bagua.distribute(other, its_optimizer, fault_tolerant=options)
        bagua.detach(model) if model in attachments else None


def test_a_saved_state(store: tuple[str, dist.TCPStore]) -> None:
    model, optimizer = small()
    bagua.distribute(model, optimizer, fault_tolerant=tolerance(store[0])[1])
    state = bagua.state_dict(model)
    with pytest.raises(ValueError, match=r"^state dict: a fault-tolerant module counts its steps with the other hosts"):
        bagua.load_state_dict(model, state)
    bagua.detach(model)


def test_a_closure(store: tuple[str, dist.TCPStore]) -> None:
    model, optimizer = small()
    bagua.distribute(model, optimizer, fault_tolerant=tolerance(store[0])[1])
    with pytest.raises(RuntimeError, match=r"^SGD steps with a closure, which a fault-tolerant module cannot repeat"):
        optimizer.step(lambda: 0.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert bagua.stats(model).steps == 1
    bagua.detach(model)


def test_join(store: tuple[str, dist.TCPStore]) -> None:
    model, optimizer = small()
    bagua.distribute(model, optimizer, fault_tolerant=tolerance(store[0])[1])
    with pytest.raises(ValueError, match=r"^join: Linear is fault-tolerant, and all ranks need as many batches then$"):
        with bagua.join(model):
            pass
    bagua.detach(model)


def test_all_algorithms_have_a_rule_for_a_lost_step() -> None:
    for row in algorithms.available(builtin_only=True):
        chosen = algorithms.get(row.name)
        assert chosen.lost_step is not None, row.name
        assert chosen.exactness.replicas_equal or chosen.lost_step is not LostStep.SKIP, "replicas of it differ"


@dataclass(frozen=True)
class Mine(algorithms.GradientAllReduce):
    """Has no rule."""

    name: ClassVar[str] = "mine"
    lost_step: ClassVar[LostStep | None] = None


@pytest.mark.parametrize(
    ("algorithm", "refusal"),
    [
        (
            Mine(),
            "^fault_tolerant: 'mine' has no rule for a lost step yet; these have one: async, .*gradient_allreduce",
        ),
        ("auto", '^fault_tolerant: not with algorithm "auto" yet: a newcomer would know neither what .* name an algo'),
    ],
    ids=["mine", "auto"],
)
def test_an_algorithm_without_a_rule_for_a_lost_step(
    store: tuple[str, dist.TCPStore], algorithm: Any, refusal: str
) -> None:
    model, optimizer = small()
    with pytest.raises(ValueError, match=refusal):
        bagua.distribute(model, optimizer, algorithm, fault_tolerant=tolerance(store[0])[1])
    assert model not in attachments


def test_a_warm_up_whose_replicas_differ(store: tuple[str, dist.TCPStore]) -> None:
    model, optimizer = small()
    with pytest.raises(
        ValueError, match=r"^fault_tolerant: Warmup needs a first algorithm that skips a lost step, such as"
    ):
        bagua.distribute(
            model, optimizer, algorithms.Warmup(5, "decentralized", "bytegrad"), fault_tolerant=tolerance(store[0])[1]
        )
    assert model not in attachments


def test_a_warm_up_before_sums_of_weights_in_place(store: tuple[str, dist.TCPStore]) -> None:
    """A hierarchy of these is off by default, and refused, also where it comes later."""
    model, optimizer = small()
    gossip = algorithms.LowPrecisionDecentralized(hierarchical=True)
    with pytest.raises(ValueError, match=r"^hierarchical: 'low_precision_decentralized' sums weights in place"):
        warmup = algorithms.Warmup(5, then=algorithms.Warmup(9, then=gossip))
        bagua.distribute(model, optimizer, warmup, fault_tolerant=tolerance(store[0])[1])
    assert model not in attachments
    fitted = without_mixed_halves(algorithms.Warmup(5, then="low_precision_decentralized"))
    assert isinstance(fitted, algorithms.Warmup)
    first, then = fitted.parts
    assert isinstance(then, algorithms.LowPrecisionDecentralized) and then.hierarchical is False
    assert isinstance(first, algorithms.GradientAllReduce) and first.hierarchical is None


@pytest.mark.parametrize("kind", [nn.SyncBatchNorm, bagua.nn.SyncBatchNorm], ids=["torch", "bagua"])
def test_batch_norm_over_all_ranks(store: tuple[str, dist.TCPStore], kind: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), kind(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(
        ValueError, match=r"^module: 1 is a SyncBatchNorm, whose process group ends with the first lost"
    ):
        bagua.distribute(model, optimizer, fault_tolerant=tolerance(store[0])[1])
    assert model not in attachments


def test_local_steps_without_an_optimizer(store: tuple[str, dist.TCPStore]) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"^optimizers: 'local_sgd' needs them with fault_tolerant: a step ends with"):
        bagua.distribute(model, [], "local_sgd", fault_tolerant=tolerance(store[0])[1])
    assert model not in attachments


def test_the_other_ranks_hear_of_it(store: tuple[str, dist.TCPStore]) -> None:
    address = store[0]

    def main(team: Any) -> str:
        model, optimizer = small()
        options = tolerance(address, 2, team.rank)[1]
        with pytest.raises(ValueError, match="not with fault_tolerant yet") as raised:
            bagua.distribute(model, optimizer, fault_tolerant=options, broadcast_buffers=team.rank == 1)
        return f"{type(raised.value).__name__}: {raised.value}"

    first, second = run_teams(2, main)
    expected = "broadcast_buffers: not with fault_tolerant yet"
    assert second == f"ValueError: {expected}"
    assert first.startswith(f"{RankMismatchError.__name__}: rank 1 cannot distribute its module: ")
    assert expected in first
