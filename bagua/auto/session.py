"""The session of a choice: measures links and steps, and lets all ranks do what rank 0 has decided, at the same step.

All ranks are at the end of the same step whenever they talk to each other, through the process group's store. Between
the turns nothing is sent, and after the choice, every few steps, two numbers beside the training.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch

from bagua.algorithms import Algorithm, Payload
from bagua.algorithms.auto import Auto
from bagua.auto.candidates import EXACT, Candidate, allowed
from bagua.auto.explanation import Explanation
from bagua.auto.facts import Facts, StepTimes
from bagua.auto.judge import Judge, Order, Outcome
from bagua.auto.links import Links, measure_links
from bagua.auto.loss_gaps import families_of
from bagua.auto.watch import DRIFT, SOONEST, Drift, Watch
from bagua.comm.store_team import decode, encode
from bagua.engine import Quality
from bagua.engine.choosing import Choosable
from bagua.engine.startup.link_probe import usable_cores

__all__ = ["LOOK", "ChoiceSession"]

LOOK = 2  # steps between two sums of the ranks' suspicions
_LONG = 12
_CHANGED = 1.5  # by which the measured rate must differ; less is noise, or another cause


class ChoiceSession:
    """Chooses the algorithm of one engine, which holds it; it holds no engine.

    Args:
        auto: the user's options, fitted to the nodes.
    """

    def __init__(self, auto: Auto) -> None:
        self._auto = auto
        self._candidates: tuple[Candidate, ...] = tuple(allowed(auto.allow, auto.nodes))
        self._explanation = self._waiting("no step has been made yet")
        self._judge: Judge | None = None  # rank 0's
        self._order = Order(0)
        self._made: Algorithm = auto.first
        self._begun = self._settled = False
        self._skip = self._left = 0
        self._plain_scaler = self._saw_joining = False
        self._times: list[StepTimes] = []
        self._moments: dict[str, float] = {}  # of the step in progress
        self._excluded: dict[int, str] = {}
        self._device = torch.device("cpu")
        self._watch: Watch | None = None
        self._drift: Drift | None = None  # beside it, where the setting has finer or coarser ones
        self._knows = False  # rank 0 has what predictions need: the choice was not loaded
        self._reviews = False  # whether the last fine step has brought something is to be seen
        self._sums: Callable[[], list[float]] | None = None  # of suspicions, in flight
        self._long_s: deque[float] = deque(maxlen=_LONG)  # lengths of steps, while it watches

    @property
    def explanation(self) -> Explanation:
        """What has been measured and decided so far; the same on all ranks between steps."""
        return self._explanation

    @property
    def settled(self) -> bool:
        """Whether nothing is measured any more."""
        return self._settled

    # -- moments, called by the engine ---------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Before the first forward pass of a step."""
        self._mark("step")

    def backward_begins(self) -> None:
        """A synchronised backward pass begins."""
        self._mark("backward")

    def optimizer_begins(self, plain_scaler: bool) -> None:
        """Before the first optimizer's step."""
        self._plain_scaler = self._plain_scaler or plain_scaler
        self._mark("optimizer")

    def step_ended(self, engine: Choosable) -> None:
        """After a step, when no exchange is in flight."""
        if self._settled:
            self._watch_step(engine)
            return
        if not self._begun:
            if self._size == 1:
                self._settle(engine, "one rank has nobody to exchange with")
            elif engine.ready:
                self._begin(engine)
            return
        if repr(engine.algorithm) != repr(self._made):
            self._settle(engine, "another algorithm took over, from a guard")
            return
        self._saw_joining = self._saw_joining or engine.joining
        if self._skip:
            self._skip -= 1
            self._moments.clear()
            return
        self._mark("end")
        self._times.append(self._step_times(engine.last.exposed_s))
        self._left -= 1
        if self._left == 0:
            self._obey(engine, self._share(engine, self._report(engine)))

    def state_dict(self) -> dict[str, Any]:
        """The choice as plain data; while candidates are tried, which of them is in force."""
        return {
            "settled": self._settled,
            "nodes": [list(node) for node in self._auto.nodes],
            "candidate": self._candidates[self._order.candidate].name,
            "explanation": self._explanation.as_dict(),
        }

    def holds(self, state: Mapping[str, Any]) -> bool:
        """Whether a choice was made in `state`, on nodes like those of now."""
        nodes = [list(node) for node in self._auto.nodes]
        return (
            bool(state["settled"])
            and Explanation.from_dict(state["explanation"]).size == self._size
            and state.get("nodes", nodes) == nodes  # states of earlier versions have none
            and state["candidate"] in (each.name for each in self._candidates)
        )

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
        """Go on with the choice in `state` if it holds, else choose anew, from full precision on."""
        holds = self.holds(state)
        names = [each.name for each in self._candidates]
        self._order = Order(names.index(state["candidate"]) if holds else 0)
        self._made = (
            self._candidates[self._order.candidate].make(self._auto.nodes, optimizers) if holds else self._auto.first
        )
        self._explanation = (
            Explanation.from_dict(state["explanation"]) if holds else self._waiting("chosen anew after loading a state")
        )
        self._begun = self._settled = holds
        self._judge, self._knows, self._reviews = None, False, False
        self._watch = self._drift = self._sums = None
        self._times, self._left, self._skip = [], 0, 0
        if holds and self._size > 1:
            self._begin_watch()
        return self._made

    # -- how it goes ---------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return sum(len(node) for node in self._auto.nodes)

    def _waiting(self, reason: str) -> Explanation:
        return Explanation("waiting", EXACT.name, reason, 0, self._auto.allow, self._size)

    def _begin(self, engine: Choosable) -> None:
        self._begun = self._knows = True
        self._device = engine.device
        links = measure_links(engine.team, engine.nodes, engine.device)
        self._excluded = {
            position: why for position, each in enumerate(self._candidates) if (why := _why_not(engine, each))
        }
        order = None
        if engine.team.rank == 0:
            self._judge = Judge(self._facts(engine, links))
            order = self._judge.begin()
        self._obey(engine, self._share(engine, order))

    def _facts(self, engine: Choosable, links: Links) -> Facts:
        node = next(node for node in engine.nodes if engine.team.rank in node)
        return Facts(
            self._auto,
            engine.nodes,
            self._candidates,
            links,
            engine.shapes,
            families_of(engine.optimizers),
            usable_cores() / len(node),
            gpu=engine.device.type == "cuda",
        )

    def _report(self, engine: Choosable, problem: str = "") -> Order | None:
        """Tell rank 0 what came of its order; returns its next one there."""
        mine = {
            "times": [asdict(each) for each in self._times],
            "excluded": {**self._excluded, **self._excluded_now(engine)},
        }
        reports = [decode(each) for each in engine.team.all_gather_bytes("choice of the algorithm", encode(mine))]
        if self._judge is None:
            return None
        excluded: dict[int, str] = {}
        for report in reports:
            excluded.update({int(position): why for position, why in report["excluded"].items()})
        ranks = [[StepTimes(**each) for each in report["times"]] for report in reports]
        return self._judge.next(Outcome(ranks, engine.step, excluded, self._quality(engine), problem))

    def _excluded_now(self, engine: Choosable) -> dict[int, str]:
        """Candidates that do not fit how the user trains."""
        found: dict[int, str] = {}
        for position, each in enumerate(self._candidates):
            made = each.make(engine.nodes, engine.optimizers)
            if self._plain_scaler and made.payload is Payload.PARAM:
                found[position] = "steps with local gradients: needs bagua.GradScaler"
            elif self._saw_joining and each.kind == "asynchronous":
                found[position] = "not within bagua.join"
        return found

    def _quality(self, engine: Choosable) -> Quality | None:
        """The compression error of the candidate in force, if it was measured."""
        quality = engine.quality
        trial_began = engine.step - self._order.skip - self._order.count
        return quality if self._order.quality and quality is not None and quality.step >= trial_began else None

    def _share(self, engine: Choosable, order: Order | None) -> Order:
        """Broadcast rank 0's order, and its explanation."""
        payload = None
        if order is not None and self._judge is not None:
            payload = encode({"order": asdict(order), "explanation": self._judge.explanation.as_dict()})
        message = decode(engine.team.broadcast_bytes("choice of the algorithm", payload))
        self._explanation = Explanation.from_dict(message["explanation"])
        return Order(**message["order"])

    def _obey(self, engine: Choosable, order: Order) -> None:
        while True:
            problem = self._adopt(engine, order)
            if not problem:
                break
            order = self._share(engine, self._report(engine, problem))
        if order.count == 0:
            self._settle(engine)
            return
        self._skip, self._left, self._times = order.skip, order.count, []
        self._moments.clear()
        if order.quality:
            engine.measure_quality_at(engine.step)
        engine.line_up()

    def _adopt(self, engine: Choosable, order: Order) -> str:
        """Train with the order's candidate; returns why that does not work."""
        before, self._order = self._made, order
        made = self._candidates[order.candidate].make(engine.nodes, engine.optimizers)
        if repr(made) == repr(before):
            return ""
        try:
            engine.hand_over(made)
        except ValueError as error:  # on all ranks alike: options that do not fit the buckets
            engine.hand_over(before)
            return str(error)
        self._made = made
        return ""

    # -- afterwards ----------------------------------------------------------------------------------------------

    def _watch_step(self, engine: Choosable) -> None:
        """Notice, on all ranks at the same step, that links have changed."""
        watch = self._watch
        if watch is None:
            return
        if engine.algorithm is not self._made:
            if repr(engine.algorithm) != repr(self._made):
                self._watch = self._drift = None
                self._settle(engine, "another algorithm took over, from a guard")
                return
            self._made = engine.algorithm
        watch.add(engine.last.comm_s)
        self._mark("end")
        self._long_s.append(self._step_times(0.0).step_s)
        drift = self._drift
        if drift is not None:
            drift.add(engine.last.comm_s)
        if self._sums is not None:
            sums, self._sums = self._sums(), None
            if max(sums[:2]) >= engine.team.size / 2:
                self._choose_again(engine, watch)
            elif drift is not None and max(sums[2:]) >= engine.team.size / 2:
                self._refine(engine, drift)
        elif engine.step % LOOK == 0:
            signs = (watch.suspicion, drift.sign if drift is not None else 0)
            reviews = drift is not None and drift.rested and self._reviews
            values = [float(sign == way) for sign in signs for way in (1, -1)]
            self._sums = engine.begin_sum([*values, float(reviews)])

    def _refine(self, engine: Choosable, drift: Drift) -> None:
        """Let rank 0 look whether a finer or a coarser setting fits better now. Collective."""
        mine = [drift.ratio, statistics.median(self._long_s)]
        found = [decode(each) for each in engine.team.all_gather_bytes("choice of the algorithm", encode(mine))]
        order, before = None, self._order.candidate
        if self._judge is not None:
            slower = statistics.median(ratio for ratio, _ in found)
            order = self._judge.refine(slower, engine.step, max(seconds for _, seconds in found))
        order = self._share(engine, order)
        self._reviews = False
        if order.candidate == before:
            drift.rest()
            return
        finer = self._candidates[order.candidate].rung > self._candidates[before].rung
        drift.stepped(1 if finer else -1)
        self._reviews = True
        self._obey(engine, replace(order, skip=0, count=0, quality=False))
        self._drift = drift

    def _choose_again(self, engine: Choosable, watch: Watch) -> None:
        """Measure the links, and choose again if they have changed. Collective."""
        links = measure_links(engine.team, engine.nodes, engine.device)
        known = self._explanation.links
        if known is not None and not links.differs(known, _CHANGED):
            watch.false_alarm()
            if self._drift is not None and not links.differs(known, DRIFT):  # else a fine step may answer it
                self._drift.forget()
            return
        self._settled, self._watch, self._drift = False, None, None
        typical = statistics.median if self._candidates[self._order.candidate].period == 1 else statistics.fmean
        mine = typical(islice(reversed(self._long_s), watch.lasting))  # none of before the change
        reports = engine.team.all_gather_bytes("choice of the algorithm", encode([mine, self._judge is not None]))
        found = [decode(each) for each in reports]
        if not found[0][1]:  # the choice was loaded: nothing is known of compute
            self._begun = False
            return
        order = None
        if self._judge is not None:
            order = self._judge.again(links, engine.step, max(seconds for seconds, _ in found))
        self._obey(engine, self._share(engine, order))

    def _begin_watch(self) -> None:
        """From now on, unless ranks do not wait for each other."""
        candidate = self._candidates[self._order.candidate]
        self._watch = Watch(candidate.period) if self._auto.adapt and candidate.kind != "asynchronous" else None
        self._long_s = deque(maxlen=max(_LONG, SOONEST * candidate.period))
        self._drift = Drift(candidate.period) if self._watch and self._knows and candidate.ladder else None

    def _settle(self, engine: Choosable, reason: str = "") -> None:
        self._settled = True
        self._times, self._left, self._skip = [], 0, 0
        if reason:
            now, made = repr(engine.algorithm), self._candidates[self._order.candidate].name
            chosen = made if now == repr(self._made) else now
            self._explanation = replace(
                self._explanation, phase="settled", chosen=chosen, reason=reason, step=engine.step
            )
        else:
            self._begin_watch()
        if engine.team.rank == 0:
            engine.notice(f"auto: {self._explanation.chosen} from step {engine.step} on: {self._explanation.reason}")

    # -- time ----------------------------------------------------------------------------------------------------

    def _mark(self, moment: str) -> None:
        if (self._left and not self._skip) or self._watch is not None:
            if self._device.type == "cuda" and self._left:
                torch.cuda.synchronize(self._device)
            self._moments[moment] = time.perf_counter()

    def _step_times(self, exposed_s: float) -> StepTimes:
        """Of the step that has ended. A rank without inputs makes steps without all of their moments."""
        moments, self._moments = self._moments, {}
        end = moments["end"]
        begun = moments.get("step", end)
        optimizer = max(moments.get("optimizer", end), begun)
        backward = min(max(moments.get("backward", begun), begun), optimizer)
        step_s = end - begun
        return StepTimes(step_s, min(exposed_s, step_s), backward - begun, end - optimizer)


def _why_not(engine: Choosable, candidate: Candidate) -> str:
    """Why this rank cannot train with `candidate`; empty if it can."""
    if candidate.kind != "exact" and any(isinstance(each, torch.optim.LBFGS) for each in engine.optimizers):
        return "a line search of LBFGS needs exact gradients"
    return engine.why_not(candidate.make(engine.nodes, engine.optimizers))
