"""`bagua.simulate`: an algorithm on many ranks, one process, one rank at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua import algorithms
from bagua.algorithms import Algorithm, Exactness, Warmup
from bagua.engine import Stats, detach, distribute, stats
from bagua.simulation.switchboard import LocalTeam, Switchboard
from bagua.simulation.turns import Turns

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """What a simulated run gave.

    Attributes:
        losses: [steps, ranks], each rank's loss before its step.
        consensus: [steps], root of the mean over ranks of the squared distance of the weights from their mean,
            after each step; 0 if all ranks are equal.
        bytes_sent: bytes per rank, mean over ranks, all steps.
        models: the trained modules by rank, plain again.
        stats: `bagua.stats` by rank.
    """

    losses: Tensor
    consensus: Tensor
    bytes_sent: float
    models: tuple[nn.Module, ...]
    stats: tuple[Stats, ...]


def simulate(
    algorithm: str | Algorithm,
    *,
    ranks: int,
    model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int, int], Tensor],
    steps: int,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    nodes: Sequence[int] | None = None,
    seed: int = 0,
    **options: Any,
) -> Simulation:
    """Train `ranks` replicas in this process, one rank at a time, as `bagua.distribute` would on a cluster.

    The very algorithm, engine and exchanges run, only the process group is a local one, so what converges here
    converges there. The same arguments give the same bits every time. Time is not simulated: exchanges run where
    they are launched.

    Args:
        algorithm: a name or an instance, as in `distribute`.
        ranks: how many.
        model: makes the module; called once for each rank, every time with the same seed.
        loss: `loss(module, rank, step)`, the scalar to differentiate; this is where each rank's data comes in.
        steps: training steps.
        optimizer: makes the optimizer from parameters; SGD with lr 0.01 by default.
        nodes: node of each rank, for hierarchical exchanges; one node by default.
        seed: of torch's generator, before each model is made and at the start of the run.
        **options: further arguments of `distribute`.

    Raises:
        ValueError: an argument is wrong, or the algorithm averages in the background, as "async" does.
        Deadlock: the algorithm makes all ranks wait for one another.

    Returns:
        Losses, consensus distance, bytes, modules and statistics.
    """
    for name, value in (("ranks", ranks), ("steps", steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
    if nodes is not None and len(nodes) != ranks:
        raise ValueError(f"nodes: {len(nodes)} entries for {ranks} ranks")
    _refuse_background(algorithm)
    make_optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.01))
    turns = Turns(ranks)
    store, boards = dist.HashStore(), dict[str, Switchboard]()
    models: list[nn.Module] = []
    for _ in range(ranks):
        torch.manual_seed(seed)
        models.append(model())
    torch.manual_seed(seed)
    losses = torch.zeros(steps, ranks)
    weights: list[list[Tensor]] = [[] for _ in range(steps)]
    consensus = torch.zeros(steps)

    def rank_main(rank: int) -> Stats:
        node = str(nodes[rank] if nodes is not None else 0)
        team = LocalTeam(
            rank, ranks, store, timedelta(days=1), "local", f"simulation/{rank}", node, turns=turns, boards=boards
        )
        module = models[rank]
        stepper = make_optimizer([param for param in module.parameters() if param.requires_grad])
        distribute(module, stepper, algorithm, process_group=team, **options)
        for step in range(steps):
            stepper.zero_grad()
            value = loss(module, rank, step)
            value.backward()
            stepper.step()
            losses[step, rank] = value.detach()
            weights[step].append(_flat(module))
            if len(weights[step]) == ranks:
                stacked = torch.stack(weights[step])
                consensus[step] = (stacked - stacked.mean(0)).square().sum(1).mean().sqrt()
                weights[step].clear()
        found = stats(module)
        detach(module)
        return found

    found = turns.run(rank_main)
    sent = sum(each.total.bytes_sent for each in found) / ranks
    return Simulation(losses, consensus, sent, tuple(models), tuple(found))


def _refuse_background(algorithm: str | Algorithm) -> None:
    """Now, and not in the middle of a run when a warm-up hands over."""
    chosen = algorithms.get(algorithm)
    if isinstance(chosen, Warmup):
        _refuse_background(chosen.first)
        _refuse_background(chosen.then)
    elif chosen.exactness is Exactness.ASYNCHRONOUS:
        raise ValueError(
            f"algorithm: {type(chosen).__name__} averages at moments that depend on time, which is not simulated; "
            "run it in processes, or simulate 'local_sgd' for a first idea"
        )


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([param.detach().double().reshape(-1) for param in module.parameters()])
