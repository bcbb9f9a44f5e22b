"""Trainings that are committed, ended and restored; everything here must be importable by the rank processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import bagua
from bagua import elastic
from bagua.elastic.memory import VARIABLE
from tests.checkpoint.runs import lamb, qadam, sgd, zero_one

Data = dict[str, Any]
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "qadam": qadam,
    "one_bit_lamb": lamb,
    "zero_one_adam": zero_one,
}
OPTIONS: dict[str, Data] = {
    "async": {"sync_interval_ms": 0},
    "diloco": {"communication_interval": 3},
    "local_sgd": {"communication_interval": 3},
    "sparse_loco": {"communication_interval": 3},
    "bytegrad": {"codec": "int4"},  # with error feedback, so that there is state to carry over
}
NUM_SAMPLES = 240


@dataclass
class Training:
    """A model on its way, with its `State`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sampler: elastic.Sampler
    state: elastic.State
    seen: list[int]
    resizes: list[elastic.Resize]

    def steps(self, num: int) -> None:
        """Of four samples on each rank."""
        samples = iter(self.sampler)
        for _ in range(num):
            indices = [next(samples) for _ in range(4)]
            self.seen += indices
            inputs = torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in indices])
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.steps += 1

    def facts(self) -> Data:
        """What tests compare."""
        return {
            "weights": torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone(),
            "steps": self.state.steps,
            "number": self.state.number,
            "position": self.sampler.position,
            "seen": list(self.seen),
            "resizes": list(self.resizes),
        }


def training(algorithm: str, addresses: list[str], seed: int = 0, **options: Any) -> Training:
    """A new training; `addresses` are the memories of the nodes."""
    node = int(os.environ.get("GROUP_RANK", "0"))
    os.environ[VARIABLE] = addresses[node]
    local = int(os.environ["LOCAL_RANK"]) if len(addresses) == 1 else 0
    os.environ["LOCAL_RANK"] = str(local)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = OPTIMIZERS.get(algorithm, sgd)(model.parameters())
    bagua.distribute(model, optimizer, algorithm, **OPTIONS.get(algorithm, {}))
    sampler = elastic.Sampler(range(NUM_SAMPLES))
    resizes: list[elastic.Resize] = []
    state = elastic.State(model, optimizer, sampler, steps=0, on_resize=resizes.append, **options)
    return Training(model, optimizer, sampler, state, [], resizes)


def begin(algorithm: str, addresses: list[str], num: int, then: int, options: Data) -> Data:
    """Train, commit, train a little more that is lost; returns what it was like at the commit."""
    it = training(algorithm, addresses, **options)
    assert it.state.restore() is None
    it.steps(num)
    it.state.commit()
    facts = it.facts()
    it.steps(then)
    it.state.close()
    return facts


def go_on(algorithm: str, addresses: list[str], num: int, options: Data) -> tuple[Data, Data, Any]:
    """Restore into a training that began elsewhere, and train; returns facts then and at the end."""
    it = training(algorithm, addresses, seed=99, **options)
    restored = it.state.restore()
    before = it.facts()
    it.steps(num)
    it.state.commit()
    it.state.close()
    return before, it.facts(), restored


def straight(algorithm: str, addresses: list[str], num: int) -> Data:
    it = training(algorithm, addresses)
    it.steps(num)
    it.state.close()
    return it.facts()


def commit_twice_but(algorithm: str, addresses: list[str], victim: int) -> Data:
    """The second commit fails on `victim`, whose memory cannot be written."""
    it = training(algorithm, addresses)
    it.steps(2)
    it.state.commit()
    facts = it.facts()
    it.steps(1)
    if dist.get_rank() == victim:
        for slot in it.state._memory._mine:
            slot.write = _full  # type: ignore[method-assign]
    try:
        it.state.commit()
    except bagua.checkpoint.CheckpointError as error:
        facts["error"] = str(error)
    it.state.close()
    return facts


def _full(about: Any, parts: Any) -> None:
    raise OSError(28, "No space left on device")


def commit_nonsense(addresses: list[str]) -> str:
    """Rank 1 holds something that is no plain data."""
    it = training("gradient_allreduce", addresses, extra=object() if dist.get_rank() else 1)
    try:
        it.state.commit()
    except bagua.checkpoint.CheckpointError as error:
        return str(error)
    finally:
        it.state.close()
    return "committed"


def terminated(addresses: list[str], directory: str, chosen: int) -> tuple[int | str | None, int, bool]:
    """SIGTERM to one rank; returns the exit code, the commit, and whether SIGTERM is what it was afterwards."""
    it = training("gradient_allreduce", addresses, directory=directory, disk_every=1000)
    it.state.restore()
    it.steps(2)
    before = signal.getsignal(signal.SIGTERM)
    if dist.get_rank() == chosen:
        os.kill(os.getpid(), signal.SIGTERM)
    code: int | str | None = "stayed"
    try:
        it.state.commit()
    except SystemExit as end:
        code = end.code
    after = signal.getsignal(signal.SIGTERM)
    it.state.close()
    return code, it.state.number, callable(before) and after == signal.SIG_DFL


def held(addresses: list[str]) -> list[list[tuple[str, int]]]:
    """(item, rank) of the parts in the memory of each node."""
    found = []
    for address in addresses:
        slots = [slot for pair in elastic_slots(address) for slot in pair]
        found.append(sorted((p["item"], p["rank"]) for s in slots if (a := s.about()) for p in a["parts"]))
    return found


def elastic_slots(address: str) -> Any:
    from bagua.elastic.memory import open_slots

    return open_slots(address)
