"""`bagua.simulate`: an algorithm on many ranks, one process, one rank at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bagua.algorithms import Algorithm, Exactness, Warmup
from bagua.algorithms.auto import get_or_auto
from bagua.algorithms.registry import registry
from bagua.engine import Stats, detach, distribute, stats
from bagua.simulation.ranks import run_in_turns
from bagua.simulation.switchboard import LocalTeam

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """Result of `bagua.simulate`.

    Attributes:
        losses: [steps, ranks], each rank's loss before its step.
        consensus: [steps], root of the mean over ranks of the squared distance of the weights from their mean,
            after each step; 0 if all ranks are equal.
        bytes_sent: bytes per rank, mean over ranks, all steps.
        models: the trained module of each rank, no longer distributed.
        stats: `bagua.stats` of each rank.
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
    optimizer: Callable[[Any], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]] | None = None,
    nodes: Sequence[int] | None = None,
    seed: int = 0,
    **options: Any,
) -> Simulation:
    """Simulate data-parallel training: train `ranks` replicas in this process, one rank at a time.

    It runs the real algorithm, engine and exchanges over a local process group, so results equal those of a cluster.
    The same arguments give the same bits every time. Time is not simulated: exchanges run when they are launched.

    Args:
        algorithm: a name or an instance, as in `bagua.distribute`.
        ranks: number of ranks.
        model: function that makes the module; called once for each rank with the same seed.
        loss: `loss(module, rank, step)`, which returns the loss of that rank on its own data.
        steps: number of training steps.
        optimizer: function that makes the optimizer, or a list of several, from the list of the trainable parameters.
            Default: SGD with lr 0.01.
        nodes: node of each rank, for hierarchical exchanges. Default: one node.
        seed: seed of torch's generator, set before each model is made and at the start of the run.
        **options: further arguments of `bagua.distribute`.

    Returns:
        Losses, consensus distance, bytes, modules and statistics.

    Raises:
        ValueError: an argument is wrong, or the algorithm communicates in the background, as "async" does.
        Deadlock: all ranks wait for one another.

    Examples:
        >>> def loss(module, rank, step):
        ...     return module(torch.full((2, 4), float(rank))).square().mean()
        >>> result = bagua.simulate("bytegrad", ranks=4, model=lambda: torch.nn.Linear(4, 1), loss=loss, steps=3)
        >>> result.losses.shape  # steps, ranks
        torch.Size([3, 4])
        >>> result.consensus.max().item()  # replicas are equal
        0.0
    """
    for name, value in (("ranks", ranks), ("steps", steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
    if nodes is not None and len(nodes) != ranks:
        raise ValueError(f"nodes: {len(nodes)} entries for {ranks} ranks")
    _refuse_background(algorithm)
    make_optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.01))
    models: list[nn.Module] = []
    for _ in range(ranks):
        torch.manual_seed(seed)
        models.append(model())
    torch.manual_seed(seed)
    losses = torch.zeros(steps, ranks, dtype=torch.float32, device="cpu")
    weights: list[list[Tensor]] = [[] for _ in range(steps)]
    consensus = torch.zeros(steps, dtype=torch.float32, device="cpu")

    def rank_main(team: LocalTeam) -> Stats:
        rank = team.rank
        module = models[rank]
        made = make_optimizer([param for param in module.parameters() if param.requires_grad])
        steppers = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        distribute(module, steppers, algorithm, process_group=team, **options)
        for step in range(steps):
            for stepper in steppers:
                stepper.zero_grad()
            value = loss(module, rank, step)
            value.backward()
            for stepper in steppers:
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

    found = run_in_turns(ranks, rank_main, nodes)
    sent = sum(each.total.bytes_sent for each in found) / ranks
    return Simulation(losses, consensus, sent, tuple(models), tuple(found))


def _refuse_background(algorithm: str | Algorithm) -> None:
    """Now, and not in the middle of a run when a warm-up hands over."""
    chosen = get_or_auto(registry, algorithm, {})
    if isinstance(chosen, Warmup):
        _refuse_background(chosen.first)
        _refuse_background(chosen.then)
    elif chosen.exactness is Exactness.ASYNCHRONOUS:
        raise ValueError(
            f"algorithm: {type(chosen).__name__} averages at moments that depend on time, which is not simulated; "
            "run it in real processes, or simulate 'local_sgd' as an approximation"
        )


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([param.detach().double().reshape(-1) for param in module.parameters()])
