"""What every algorithm keeps to, whoever wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import Algorithm, Exactness, Payload
from bagua.algorithms import get as get_algorithm
from bagua.comm.team import Team
from bagua.testing.checks import require, run_checks
from bagua.testing.specification import check_is_a_value, check_options
from bagua.testing.training import Case, Model, Run, batch, on_ranks, sgd, train

__all__ = ["ALGORITHM_CHECKS", "check_algorithm"]


def check_algorithm(
    algorithm: str | Algorithm | type[Algorithm],
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    ranks: int = 4,
    steps: int = 12,
    only: Collection[str] = (),
    skip: Collection[str] = (),
) -> None:
    """Check that an algorithm does what the engine, checkpoints and the documentation rely on.

    The ranks are threads of this process that take turns (`bagua.simulate`); those of an asynchronous algorithm run
    at once and communicate over gloo. Choose options so that everything happens within `steps` steps: an interval of
    2 rather than 500.

    Args:
        algorithm: a name, an instance, or a class, which is made with its defaults. It need not be registered.
        optimizer: makes the optimizer from parameters; SGD with momentum by default.
        ranks: how many, an even number.
        steps: training steps of a run.
        only: run these checks only; names are the keys of `ALGORITHM_CHECKS`.
        skip: leave these out.

    Raises:
        AssertionError: a check failed; the message names the algorithm and the check.
        ValueError: an argument is wrong.

    Examples:
        >>> import bagua.testing
        >>> bagua.testing.check_algorithm("gradient_allreduce", only=("value", "options", "bytes"))
    """
    made = algorithm() if isinstance(algorithm, type) else get_algorithm(algorithm)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2 or ranks % 2:
        raise ValueError(f"ranks: expected an even number >= 2, got {ranks!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 4:
        raise ValueError(f"steps: expected an integer >= 4, got {steps!r}")
    run_checks(f"algorithm {made.name!r}", ALGORITHM_CHECKS, Case(made, optimizer, ranks, steps), only, skip)


def _value(case: Case) -> None:
    """A frozen dataclass with a name, a summary of one line, and a class of exactness."""
    algorithm = case.algorithm
    check_is_a_value(algorithm)
    require(isinstance(algorithm.exactness, Exactness), f"exactness is {algorithm.exactness!r}")
    require(isinstance(algorithm.payload, Payload), f"payload is {algorithm.payload!r}")
    require(algorithm.payload in algorithm.payloads, f"payloads {algorithm.payloads} lack {algorithm.payload}")
    require(algorithm.summary and "\n" not in algorithm.summary, "summary: must be one line, shown by `available()`")
    require(type(algorithm).__doc__, "the class has no docstring")
    unknown = set(algorithm.not_compared) - {field.name for field in fields(algorithm)}
    require(not unknown, f"not_compared names what is no option: {', '.join(sorted(unknown))}")
    for size in (1, 2, 8):
        sent = algorithm.bytes_per_rank(1 << 20, size)
        require(math.isfinite(sent) and sent >= 0, f"bytes_per_rank(1 << 20, {size}) is {sent!r}")
    require(algorithm.bytes_per_rank(1 << 20, 1) == 0, "bytes_per_rank: must be 0 for a single rank")


def _options(case: Case) -> None:
    check_options("algorithm", Algorithm, type(case.algorithm))


def _replicas(case: Case) -> None:
    """Ranks are equal after each step if the class of exactness says so, and equal after an average in any case."""
    _check_training(case, case.trained)


def _nodes(case: Case) -> None:
    """On two nodes, flat and, if that is an option, hierarchical."""
    _check_training(case, train(case, case.nodes))
    if "hierarchical" in {field.name for field in fields(case.algorithm)}:
        hierarchical = replace(case, algorithm=replace(case.algorithm, hierarchical=True))
        runs = train(hierarchical, case.nodes)
        _check_training(hierarchical, runs)
        if case.repeatable and not case.algorithm.exactness.replicas_equal:
            return
        _require_equal(_last(runs), "ranks of one hierarchy differ after `bagua.average_parameters`")


def _repeats(case: Case) -> None:
    """The same run has the same bits."""
    if not case.repeatable:
        return
    for first, second in zip(case.trained, train(case), strict=True):
        require(torch.equal(_stacked(first), _stacked(second)), f"rank {first.team.rank}: two equal runs differ")


def _resumes(case: Case) -> None:
    """Stopped, saved, loaded into new objects and continued, it has the bits of a run that was never stopped."""
    stops = (1, case.steps // 2, case.steps - 1) if case.repeatable else (case.steps // 2,)

    def whole(team: Team) -> tuple[list[bytes], Tensor]:
        run, saved, start = Run(case, team), [], 0
        for stop in stops:
            run.train(range(start, stop))
            saved.append(run.save())
            start = stop
        run.train(range(start, case.steps)).close()
        return saved, run.flat()

    told = on_ranks(case, whole)
    for number, stop in enumerate(stops):

        def rest(team: Team, number: int = number, stop: int = stop) -> Tensor:
            run = Run(case, team).load(told[team.rank][0][number])
            return run.train(range(stop, case.steps)).close().flat()

        for rank, found in enumerate(on_ranks(case, rest)):
            same = torch.equal(found, told[rank][1])
            require(same or not case.repeatable, f"rank {rank}: resumed after step {stop}, it ends with other weights")
            require(bool(found.isfinite().all()), f"rank {rank}: resumed after step {stop}, weights are not finite")


def _single_rank(case: Case) -> None:
    """One rank sends nothing and trains; an exact algorithm then does what plain training does, bit for bit."""
    (run,) = on_ranks(case, lambda team: Run(case, team).train(range(case.steps)).close(), ranks=1)
    require(run.sent[-1] == 0, f"a single rank sent {run.sent[-1]} bytes")
    _require_learned([run])
    if case.algorithm.exactness is Exactness.EXACT:
        require(torch.equal(run.flat(), _plain(case, 1)), "one rank and plain training differ, though it is EXACT")


def _mean_gradient(case: Case) -> None:
    """An exact algorithm steps with the mean gradient of all ranks."""
    if case.algorithm.exactness is not Exactness.EXACT or not getattr(case.algorithm, "average", True):
        return
    found = _last(case.trained)[0]
    worst = float((found - _plain(case, case.ranks)).abs().max())
    require(worst < 1e-4, f"weights differ by {worst:.2g} from those of the mean gradient, though it is EXACT")


def _bytes(case: Case) -> None:
    """What is sent is what `bytes_per_rank` says, within 2 % and what rounding up a bucket costs."""
    warm, counted, n = case.steps, 12, 30_000

    def sent(team: Team) -> float:
        model = nn.Sequential(nn.Linear(100, n // 200, bias=False), nn.Linear(n // 200, 100, bias=False))  # two buckets
        optimizer = case.optimizer(model.parameters())
        bagua.distribute(model, optimizer, case.algorithm, process_group=team, bucket_bytes=2 * n, num_lanes=1)
        before = 0
        for step in range(warm + counted):
            before = bagua.stats(model).total.bytes_sent if step == warm else before
            model(torch.full((1, 100), 0.01 * (team.rank + step + 1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = bagua.stats(model).total.bytes_sent
        bagua.detach(model)
        return (after - before) / counted

    if not case.repeatable:
        return  # rounds take place when there is time
    found = sum(on_ranks(case, sent)) / case.ranks
    said = case.algorithm.bytes_per_rank(n, case.ranks)
    require(abs(found - said) <= 0.02 * said + 256, f"a rank sent {found:.0f} bytes a step, bytes_per_rank: {said:.0f}")


def _detaches(case: Case) -> None:
    """A detached module trains alone; distributed again, all start from rank 0's weights."""

    def again(team: Team) -> tuple[Tensor, Run]:
        run = Run(case, team).train(range(2)).close()
        if team.rank == 0:  # alone: whatever still communicates would wait for the others
            for step in range(2):
                x, y = batch(0, step)
                (run.model(x) - y).square().mean().backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
        run.distribute()
        start = run.flat()
        run.weights.clear()
        return start, run.train(range(2, case.steps)).close()

    results = on_ranks(case, again)
    _require_equal([start for start, _ in results], "distributed again, ranks do not start from rank 0's weights")
    _check_equal_steps(case, [run for _, run in results])


def _accumulates(case: Case) -> None:
    """Passes under `bagua.no_sync` send nothing: two of them and one of their sum cost the same bytes."""
    runs = on_ranks(case, lambda team: Run(case, team).train(range(case.steps), passes=2).close())
    _require_learned(runs)
    _check_equal_steps(case, runs)
    if not case.repeatable:
        return
    for one, two in zip(case.trained, runs, strict=True):
        sent = f"{two.sent[-1]} bytes with two passes a step, {one.sent[-1]} with one"
        require(two.sent[-1] == one.sent[-1], f"rank {one.team.rank} sent {sent}")
        if case.algorithm.exactness is Exactness.EXACT:
            worst = float((one.flat() - two.flat()).abs().max())
            require(worst < 1e-4, f"rank {one.team.rank}: two passes and one of their sum differ by {worst:.2g}")


def _unused(case: Case) -> None:
    """Parameters that no rank uses stay as they are; those that some ranks use stay equal where they should."""

    def idle(team: Team) -> tuple[Run, float]:
        run = Run(case, team, idle=True)
        assert run.model.never is not None
        before = run.model.never.weight.detach().clone()
        run.train(range(case.steps)).close()
        require(run.model.never.weight.grad is None, f"rank {team.rank}: an unused parameter has a gradient")
        return run, float((run.model.never.weight.detach() - before).abs().max())

    results = on_ranks(case, idle)
    runs = [run for run, _ in results]
    _require_learned(runs)
    _check_equal_steps(case, runs)
    for rank, (run, moved) in enumerate(results):
        reach = float((run.weights[0] - run.weights[-1]).abs().max())
        most = 0.0 if case.algorithm.payload is Payload.GRAD else 0.5 * reach
        require(moved <= most, f"rank {rank}: a parameter that no rank used moved by {moved:.2g}")


ALGORITHM_CHECKS: dict[str, Callable[[Case], None]] = {
    "value": _value,
    "options": _options,
    "replicas": _replicas,
    "nodes": _nodes,
    "repeats": _repeats,
    "resumes": _resumes,
    "single_rank": _single_rank,
    "mean_gradient": _mean_gradient,
    "bytes": _bytes,
    "detaches": _detaches,
    "accumulates": _accumulates,
    "unused": _unused,
}
"""The checks of `check_algorithm`, in the order in which they run."""


def _stacked(run: Run) -> Tensor:
    return torch.stack([*run.weights, run.flat()])


def _last(runs: Sequence[Run]) -> list[Tensor]:
    return [run.flat() for run in runs]


def _check_training(case: Case, runs: Sequence[Run]) -> None:
    _require_learned(runs)
    _check_equal_steps(case, runs)
    _require_equal(_last(runs), "ranks differ after `bagua.average_parameters`")


def _check_equal_steps(case: Case, runs: Sequence[Run]) -> None:
    """Equal after each step, or apart after one at least."""
    first = torch.stack(runs[0].weights)
    apart = [rank for rank, run in enumerate(runs) if not torch.equal(torch.stack(run.weights), first)]
    kind = case.algorithm.exactness
    if kind.replicas_equal:
        require(not apart, f"ranks {apart} differ from rank 0 after some step, though it is {kind.name}")
    elif case.repeatable:
        require(apart, f"ranks are equal after each step, so it is not {kind.name}; or no step lies between rounds")


def _require_equal(tensors: Sequence[Tensor], message: str) -> None:
    require(all(torch.equal(tensor, tensors[0]) for tensor in tensors), message)


def _require_learned(runs: Sequence[Run]) -> None:
    for run in runs:
        require(bool(run.flat().isfinite().all()), f"rank {run.team.rank}: weights are not finite")
    before, after = (sum(losses) / len(runs) for losses in ([r.loss_before for r in runs], [r.loss() for r in runs]))
    require(after < before, f"the loss rose from {before:.3g} to {after:.3g}; does the optimizer suit it?")


def _plain(case: Case, ranks: int) -> Tensor:
    """Weights of training without Bagua with the mean gradient of `ranks`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model()
    optimizer = case.optimizer(model.parameters())
    for step in range(case.steps):
        for rank in range(ranks):
            x, y = batch(rank, step)
            ((model(x) - y).square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])
