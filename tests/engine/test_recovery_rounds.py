"""A rank is lost at each point of an interval of local steps: an exchange counts on all survivors or on none."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.engine.context import EngineContext
from bagua.engine.distributed_module import add_step_listener
from bagua.engine.hooks import attachments
from bagua.engine.recovery.catch_up import kept_tensors
from tests.engine.membership_store import Killed, drop_rank
from tests.engine.shared_membership import SharedMembership
from tests.rank_threads import run_teams

SIZE, INTERVAL, ROUNDS = 3, 2, 4
#: What a rank does in an interval: at "launched" its part is on its way, at "exchanged" it has the mean.
ROUND = ["start"] * INTERVAL + ["launched", "exchanged", "finish", "committed"]
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}  # the outer step takes the mean of the weights


class Counts:
    """Listens to the steps of a module: (steps, exchanges, bytes sent) after each."""

    def __init__(self, module: nn.Module) -> None:
        self.seen: list[tuple[int, int, int]] = []
        self._module = module
        add_step_listener(module, self)

    def step_ended(self, step: int) -> None:
        total = bagua.stats(self._module).total
        self.seen.append((step, total.launches, total.bytes_sent))

    def engine_ends(self, *, replaced: bool) -> None:
        assert not replaced


class Script:
    """Ranks that train, of which one is lost and another one may hold until that is known.

    Args:
        place: of the rank that is lost.
        dies: number of the event at which it is lost.
        holds: number of the event at which the rank after it holds; None: it does not.

    Attributes:
        after: the rank is lost once the third one has come to the event of this number.
    """

    _runs = itertools.count()

    def __init__(self, store: str, place: int, dies: int, holds: int | None, size: int = SIZE) -> None:
        run = next(self._runs)
        self.names = [f"r{run}h{rank}" for rank in range(size)]
        self.place, self.dies = place, dies
        self.holder, self.holds = (place + 1) % size, holds
        self.after, self._moved = -1, threading.Condition()
        self.members = SharedMembership(self.names, store, self.event)
        self.events: dict[str, list[str]] = {name: [] for name in self.names}
        self.here = threading.local()

    def event(self, name: str, what: str) -> None:
        """A rank has come to a point."""
        number = len(self.events[name])
        with self._moved:
            self.events[name].append(what)
            self._moved.notify_all()
        rank = self.names.index(name)
        if rank == self.place and number == self.dies:
            third = self.events[self.names[(self.holder + 1) % len(self.names)]]
            with self._moved:
                assert self.after < 0 or self._moved.wait_for(lambda: len(third) > self.after, 60)
                # One that is still in `distribute` takes over the weights of another, and a local step of its with it.
                assert self._moved.wait_for(lambda: all(self.events.values()), 60)
            raise Killed
        if rank == self.holder and number == self.holds:
            with self.members.changed:
                assert self.members.changed.wait_for(lambda: self.members.epoch.number > 1, 60)

    def commit(self, context: EngineContext, original: Any) -> None:
        """In place of `EngineContext.commit`."""
        self.event(self.here.name, "launched")
        context.wait()
        self.event(self.here.name, "exchanged")
        original(context)
        self.event(self.here.name, "committed")

    def goes_on(self, model: nn.Module) -> bool:
        """Whether a rank makes another step."""
        return bagua.stats(model).steps < ROUNDS * INTERVAL

    def train(self, team: Any, algorithm: Any, make_optimizer: Any) -> dict[str, Any] | None:
        """One rank. Step by step its weights grow by one in the place of its rank."""
        self.here.name = name = self.names[team.rank]
        model = nn.Linear(SIZE, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = make_optimizer(model.parameters())
        options = bagua.FaultTolerance(seat=self.members.seat(name), open_timeout_s=600)
        bagua.distribute(model, optimizer, algorithm, fault_tolerant=options)
        counts, reported = Counts(model), []
        bagua.metrics.report(model, lambda stats: reported.append((stats.rank, stats.steps)), every=1)
        direction = -torch.eye(SIZE)[team.rank : team.rank + 1]
        try:
            while self.goes_on(model):
                model(direction).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except Killed:
            self.members.lose(name)
            drop_rank(model)
            return None
        stats, kept = bagua.stats(model), kept_tensors(attachments[model].engine)
        ended = {
            "weights": model.weight.detach().clone()[0],
            "kept": {key: tensor.clone() for key, tensor in kept.items()},
            "changes": stats.membership,
            "steps": stats.steps,
            "counts": counts.seen,
            "reported": reported,
        }
        bagua.detach(model)
        return ended


def sgd(params: Any) -> torch.optim.Optimizer:
    """Steps of length 1."""
    return torch.optim.SGD(params, lr=1.0)


def zero_one_adam(params: Any) -> torch.optim.Optimizer:
    """Two exact steps, then intervals of `INTERVAL` steps."""
    return bagua.optim.ZeroOneAdam(params, lr=0.1, var_freeze_step=1, local_step_scaler=1, local_step_clipper=INTERVAL)


def run(
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    algorithm: Any,
    place: int,
    dies: int,
    holds: int | None = None,
    make_optimizer: Any = sgd,
    kind: type[Script] = Script,
    after: int = -1,
) -> tuple[Script, list[dict[str, Any]]]:
    """Train; returns what the survivors end with."""
    script, original = kind(store, place, dies, holds), EngineContext.commit
    script.after = after
    monkeypatch.setattr(EngineContext, "commit", lambda context: script.commit(context, original))
    ends = run_teams(SIZE, script.train, algorithm, make_optimizer)
    monkeypatch.undo()
    assert ends[place] is None, "the rank that was to be lost has not been"
    return script, [end for end in ends if end is not None]


def check(script: Script, ends: list[dict[str, Any]], in_flight: bool = False, drops: bool = False) -> None:
    """All survivors have made all steps, and hold the same.

    Args:
        in_flight: the last round of their weights is.
        drops: a step that averages gradients may have been lost.
    """
    first = ends[0]
    assert first["reported"][-1] == (0, ROUNDS * INTERVAL), "the first survivor is rank 0 now"
    assert not any(end["reported"] for end in ends[1:])
    for end in ends:
        assert end["steps"] == ROUNDS * INTERVAL
        assert in_flight or torch.equal(end["weights"], first["weights"])
        assert end["kept"].keys() == first["kept"].keys()
        assert all(torch.equal(tensor, first["kept"][key]) for key, tensor in end["kept"].items())
        assert [change.lost for change in end["changes"] if change.lost] == [(script.names[script.place],)]
        assert drops or not any(change.skipped for change in end["changes"])
        counts = end["counts"]
        assert counts[-1][0] == ROUNDS * INTERVAL
        for before, after in itertools.pairwise(counts):
            assert before[0] < after[0] and before[1] <= after[1] and before[2] <= after[2]


def check_sums(script: Script, ends: list[dict[str, Any]]) -> None:
    """The lost rank took part in whole exchanges only, and all steps of the survivors are in the means."""
    weights = ends[0]["weights"]
    assert weights.sum().item() == pytest.approx(ROUNDS * INTERVAL, rel=1e-5)
    rounds = weights[script.place].item() * SIZE / INTERVAL
    assert rounds == pytest.approx(round(rounds), abs=1e-4)
    # Its last exchange counts if it counted on one survivor when the epoch was decided.
    assert round(rounds) == max(script.members.reports[0].values())
    if len(set(script.members.reports[0].values())) == 1:  # no rank took over another's place
        others = [weights[rank].item() for rank in range(SIZE) if rank != script.place]
        assert others == pytest.approx([others[0]] * len(others), rel=1e-5)


def points(num_rounds: int = 2) -> list[tuple[int, int | None]]:
    """When a rank dies and another one holds, so that each gets there whatever the other one does."""
    sequence = ROUND * num_rounds
    found: list[tuple[int, int | None]] = []
    for dies in range(len(sequence)):
        found.append((dies, None))
        for holds in range(len(sequence)):
            if dies <= _reach(sequence, holds) and holds <= _reach(sequence, dies):
                found.append((dies, holds))
    return found


def _reach(sequence: list[str], other: int) -> int:
    """The last point that a rank reaches while another one does not go on from its point `other`."""
    return next((at for at in range(other + 1, len(sequence)) if sequence[at] == "launched"), len(sequence) - 1)


# Between two exchanges; with the exchange on its way; with a mean that counts on another survivor, or on none.
CHOSEN = [(1, None), (2, 0), (6, 3), (9, 10), (8, 9)]
#: Algorithms with more state than sums show.
STATEFUL = {
    "momentum": (bagua.algorithms.DiLoCo(communication_interval=INTERVAL), "sgd"),
    "codec": (bagua.algorithms.LocalSGD(communication_interval=INTERVAL, codec="minmax_uint8"), "sgd"),
    "delay": (bagua.algorithms.DiLoCo(communication_interval=INTERVAL, delay=1, mixing=0.0), "sgd"),
    "hierarchical": (bagua.algorithms.LocalSGD(communication_interval=INTERVAL, hierarchical=True), "sgd"),
    "zero_one_adam": (bagua.algorithms.ZeroOneAdam(codec="minmax_uint8"), "zero_one_adam"),
}


@pytest.mark.parametrize(("dies", "holds"), CHOSEN)
def test_a_rank_is_lost(monkeypatch: pytest.MonkeyPatch, store: str, dies: int, holds: int | None) -> None:
    algorithm = bagua.algorithms.LocalSGD(communication_interval=INTERVAL)
    script, ends = run(monkeypatch, store, algorithm, 2, dies, holds)
    check(script, ends)
    check_sums(script, ends)


@pytest.mark.parametrize(("dies", "holds"), CHOSEN[1:3])
@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_a_rank_is_lost_with_second_moments(
    monkeypatch: pytest.MonkeyPatch, store: str, name: str, dies: int, holds: int | None
) -> None:
    """A rank that takes over another one's optimizer takes over the second moments from which it was corrected, too."""
    algorithm = bagua.algorithms.get(name, communication_interval=INTERVAL, scale_second_moment=True)
    script, ends = run(monkeypatch, store, algorithm, 2, dies, holds, lambda params: torch.optim.AdamW(params, lr=0.1))
    for end in ends:
        seconds, steps = ([t for key, t in end["kept"].items() if key[0] == n] for n in ("second_moment", "adam_steps"))
        assert [each.tolist() for each in steps] == [[ROUNDS * INTERVAL]] and seconds[0].isfinite().all()
        end["kept"] = {key: t for key, t in end["kept"].items() if key[0] not in ("second_moment", "adam_steps")}
    check(script, ends)


@pytest.mark.parametrize(("dies", "holds"), CHOSEN)
@pytest.mark.parametrize("codec", ["identity", "minmax_uint8"])
def test_a_rank_is_lost_with_mean_moments(
    monkeypatch: pytest.MonkeyPatch, store: str, codec: str, dies: int, holds: int | None
) -> None:
    """From the round in which members change nothing is inferred; the rounds after it go on."""
    algorithm = bagua.algorithms.LocalSGD(communication_interval=INTERVAL, codec=codec, mean_moments=True)
    script, ends = run(monkeypatch, store, algorithm, 2, dies, holds, lambda params: torch.optim.AdamW(params, lr=0.1))
    check(script, ends)


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "holds"), points())
@pytest.mark.parametrize(("name", "place"), [("local_sgd", 0), ("diloco", 2)])
def test_a_rank_is_lost_anywhere(
    monkeypatch: pytest.MonkeyPatch, store: str, name: str, place: int, dies: int, holds: int | None
) -> None:
    options = PLAIN if name == "diloco" else {}
    algorithm = bagua.algorithms.get(name, communication_interval=INTERVAL, **options)
    script, ends = run(monkeypatch, store, algorithm, place, dies, holds)
    check(script, ends)
    check_sums(script, ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dies", "holds"),
    # The first steps of 0/1 Adam average gradients: while one rank holds, another does not get beyond that step.
    [(name, *point) for name in STATEFUL for point in points() if name != "zero_one_adam" or point[1] is None],
)
def test_a_rank_is_lost_with_more_state(
    monkeypatch: pytest.MonkeyPatch, store: str, name: str, dies: int, holds: int | None
) -> None:
    algorithm, optimizer = STATEFUL[name]
    make_optimizer = zero_one_adam if optimizer == "zero_one_adam" else sgd
    script, ends = run(monkeypatch, store, algorithm, 2, dies, holds, make_optimizer)
    check(script, ends, in_flight=name == "delay", drops=name == "zero_one_adam")


@pytest.mark.parametrize("name", STATEFUL)
def test_without_a_loss_nothing_is_different(name: str, store: str) -> None:
    algorithm, optimizer = STATEFUL[name]
    make_optimizer = zero_one_adam if optimizer == "zero_one_adam" else sgd
    script = Script(store, place=0, dies=-1, holds=None, size=2)
    tolerant = run_teams(2, script.train, algorithm, make_optimizer)
    plain = run_teams(2, train_plainly, algorithm, make_optimizer)
    for end, weights in zip(tolerant, plain, strict=True):
        assert torch.equal(end["weights"], weights) and weights.abs().sum() > 0


def train_plainly(team: Any, algorithm: Any, make_optimizer: Any) -> torch.Tensor:
    """As `Script.train`, without fault tolerance."""
    model = nn.Linear(SIZE, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make_optimizer(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    for _ in range(ROUNDS * INTERVAL):
        model(-torch.eye(SIZE)[team.rank : team.rank + 1]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    bagua.detach(model)
    return model.weight.detach()[0]


def test_a_rank_is_lost_before_the_first_gradients(monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    """The others wait in the store for the order of gradients, and must not do so until the timeout."""
    algorithm, _ = STATEFUL["zero_one_adam"]
    script, ends = run(monkeypatch, store, algorithm, 0, 0, None, zero_one_adam)
    check(script, ends, drops=True)
