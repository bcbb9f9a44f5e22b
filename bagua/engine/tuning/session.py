"""The tuning session of one engine: measure steps, report to rank 0, adopt its settings, all at the same step.

At the end of a turn the ranks exchange their step times through the process group's store, and rank 0 broadcasts
the next settings. Between turns, and after tuning, nothing is sent.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from bagua.algorithms.base import Algorithm
from bagua.autotune import Autotune, Measurement, Order, Outcome, Settings, Tuner
from bagua.autotune.log import open_log, write_line
from bagua.autotune.progress import Progress
from bagua.autotune.saved import save
from bagua.comm.store_team import decode, encode
from bagua.engine.reducer.bucketing import Plan
from bagua.engine.tuning.search_space import period_of, space_of, why_not
from bagua.engine.tuning.tunable import Tunable

__all__ = ["TuningSession"]


class TuningSession:
    """Tunes one engine. The engine holds it; it holds no engine.

    Args:
        options: None if there is nothing to search, as settings were found before.
        key: of the entry in the file of results.
        found: what that entry holds; then there is nothing to search either.

    Attributes:
        begun: settings may differ from those that `distribute` was given.
        settled: they will not change any more.
    """

    def __init__(self, options: Autotune | None, key: str = "", found: Settings | None = None) -> None:
        self.begun = self.settled = False
        self._options, self._key, self._found = options, key, found
        self._phase, self._reason = "waiting", ""
        self._tuner: Tuner | None = None  # rank 0's
        self._default: Settings | None = None
        self._algorithm: Algorithm | None = None
        self._facts: dict[str, Any] = {}  # for `progress`; from rank 0
        self._log: Path | None = None
        self._measured: list[Measurement] = []  # and not yet logged
        self._left = 0  # steps of this turn
        self._steps_s: list[float] = []
        self._began_s: float | None = None

    # -- moments, called by the engine ---------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Before the first forward pass of a step."""
        if self._left:
            self._began_s = time.perf_counter()

    def step_ended(self, engine: Tunable) -> None:
        """After a step, when no exchange is in flight."""
        if self.settled:
            return
        if not self.begun:
            if engine.buckets and not engine.hand_overs:
                self._begin(engine)
            return
        if self._began_s is not None:
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            self._steps_s.append(time.perf_counter() - self._began_s)
            self._began_s = None
        self._left -= 1
        if self._left == 0:
            reports = engine.team.all_gather_bytes("tuning", encode(self._steps_s))
            ranks_s = [[float(each) for each in decode(report)] for report in reports]
            order = self._tuner.next(Outcome(ranks_s)) if self._tuner is not None else None
            self._obey(engine, self._share(engine, order))

    def start_over(self, engine: Tunable) -> None:
        """Go back to the settings of before, and tune anew when it is time: another algorithm takes over, say."""
        if self.begun and self._default is not None:
            engine.adopt_settings(self._default)
        if self._options is not None:
            self.begun = self.settled = False
            self._phase, self._reason, self._tuner, self._left = "waiting", "", None, 0

    def settle(self, reason: str, algorithm: Algorithm | None = None) -> None:
        """The engine's settings are the result; there is nothing to search.

        Args:
            algorithm: as it is without tuning, if that is not known yet.
        """
        self.begun = self.settled = True
        self._algorithm = algorithm or self._algorithm
        self._phase, self._reason, self._tuner = "done", reason, None

    def state_dict(self, engine: Tunable) -> tuple[Plan | None, Algorithm, dict[str, Any] | None]:
        """What the engine saves: plan, algorithm as it is without tuning, and the result if there is one.

        While tuning is in progress that is the plan of before, and not what is being tried just now.
        """
        plan = engine.plan
        if not self.begun or self._algorithm is None:
            return plan, engine.algorithm, None
        if self.settled:
            return plan, self._algorithm, {"size": engine.team.size, "settings": engine.settings.as_json()}
        assert self._default is not None
        if plan is not None and engine.settings.bucket_bytes != self._default.bucket_bytes:
            plan = engine.plan_with(self._default.bucket_bytes)
        return plan, self._algorithm, None

    def progress(self, settings: Settings) -> Progress:
        """A snapshot; `settings` are those in force."""
        return Progress(self._phase, self._reason, settings, **self._facts)

    # -- how it goes ---------------------------------------------------------------------------------------------

    def _begin(self, engine: Tunable) -> None:
        assert self._options is not None
        reason = why_not(engine)
        if reason:
            self.settled = True
            self._phase, self._reason = "off", reason
            engine.notice(f"autotune: not tuning: {reason}")
            return
        self.begun = True
        self._default, self._algorithm = engine.settings, engine.algorithm
        if self._found is not None:
            self._adopt_found(engine, self._found)
            return
        order = None
        if engine.team.rank == 0:
            if self._options.log and self._log is None:
                self._open_log(engine, self._options.log)
            period = period_of(engine.algorithm)
            self._tuner = Tuner(self._options, space_of(engine), period, self._measured.append)
            order = self._tuner.begin()
        self._obey(engine, self._share(engine, order))

    def _adopt_found(self, engine: Tunable, found: Settings) -> None:
        """Use what the file of results holds.

        Raises:
            ValueError: it changes what must not be tuned here.
        """
        axes, before = space_of(engine).axes, engine.settings.as_json()
        wrong = [name for name, value in found.as_json().items() if value != before[name] and name not in axes]
        if wrong:
            raise ValueError(f"autotune: file: {', '.join(wrong)} of {engine.algorithm.name!r} cannot be set here")
        problem = _change(engine, found)
        if problem:
            engine.notice(f"autotune: the settings in the file cannot be applied: {problem}", urgent=True)
        engine.close_lanes(engine.num_busy_lanes)
        self._facts = {"tuned": tuple(axes)}
        self.settle("from the file of results")

    def _share(self, engine: Tunable, order: Order | None) -> Order:
        """Broadcast rank 0's order."""
        self._write(engine)
        payload = None
        if order is not None:
            facts = {"settings": order.settings.as_json(), "num_steps": order.num_steps, "facts": self._known()}
            payload = encode(facts)
        message = decode(engine.team.broadcast_bytes("tuning", payload))
        self._facts = {**message["facts"], "tuned": tuple(message["facts"]["tuned"])}
        self._facts["problems"] = tuple(self._facts["problems"])
        self._phase = self._facts.pop("phase")
        return Order(Settings.from_json(message["settings"]), int(message["num_steps"]))

    def _known(self) -> dict[str, Any]:
        tuner = self._tuner
        assert tuner is not None
        return {
            "phase": tuner.phase,
            "tuned": list(tuner.axes),
            "num_samples": len(tuner.trials.samples),
            "num_steps": tuner.num_steps,
            "default_step_s": tuner.default_s,
            "best_step_s": tuner.best_s,
            "problems": [f"{s.settings.describe()}: {s.problem}" for s in tuner.trials.samples if s.problem],
        }

    def _obey(self, engine: Tunable, order: Order) -> None:
        while True:
            problem = _change(engine, order.settings)
            if order.num_steps == 0:
                self._finish(engine, problem)
                return
            if not problem:
                engine.line_up()
                self._left, self._steps_s = order.num_steps, []
                return
            following = self._tuner.next(Outcome((), problem)) if self._tuner is not None else None
            order = self._share(engine, following)

    def _finish(self, engine: Tunable, problem: str) -> None:
        engine.close_lanes(engine.num_busy_lanes)
        self.settled = True
        default_s, best_s = self._facts["default_step_s"], self._facts["best_step_s"]
        text = f"{engine.settings.describe()}: {_ms(best_s)} a step, {_ms(default_s)} with the defaults"
        engine.notice(f"autotune: {text}{f' ({problem})' if problem else ''}")
        if self._tuner is not None and self._options is not None and self._options.file is not None and not problem:
            facts = {key: value for key, value in self._facts.items() if key != "tuned"}
            try:
                save(self._options.file, self._key, engine.settings, facts)
            except (OSError, ValueError) as error:
                engine.notice(f"autotune: the result could not be saved: {error}", urgent=True)
        self._tuner = None

    def _open_log(self, engine: Tunable, log: str | bool) -> None:
        try:
            self._log = open_log(log)
            engine.notice(f"autotune: log in {self._log}")
        except (OSError, ValueError) as error:  # on rank 0 only: an exception here would leave the other ranks waiting
            engine.notice(f"autotune: the log cannot be written: {error}", urgent=True)

    def _write(self, engine: Tunable) -> None:
        payload_bytes = sum(bucket.nbytes for bucket in engine.buckets)
        try:
            for measurement in self._measured:
                if self._log is not None:
                    write_line(self._log, measurement, engine.step, payload_bytes)
        except OSError as error:
            self._log = None
            engine.notice(f"autotune: the log cannot be written: {error}", urgent=True)
        self._measured.clear()


def _change(engine: Tunable, settings: Settings) -> str:
    """Adopt `settings` on all ranks, or on none; returns why not. Collective."""
    before, lanes = engine.settings, engine.num_open_lanes
    if settings == before:
        return ""
    problem = ""
    try:
        engine.check_settings(settings)
    except (RuntimeError, MemoryError) as error:
        problem = f"{type(error).__name__}: {error}"
    problems, _ = _agree(engine, problem)
    if problems:
        return problems
    try:
        engine.adopt_settings(settings)
    except (RuntimeError, MemoryError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    problems, most_opened = _agree(engine, problem)
    if problems:
        engine.close_lanes(lanes)
        engine.num_opened = most_opened  # names of groups must be new on all ranks
        engine.adopt_settings(before)
    return problems


def _agree(engine: Tunable, problem: str) -> tuple[str, int]:
    """All ranks' problems, and the most lanes that any of them has opened so far."""
    reports = [decode(each) for each in engine.team.all_gather_bytes("tuning", encode([problem, engine.num_opened]))]
    return "; ".join(f"rank {rank}: {said}" for rank, (said, _) in enumerate(reports) if said), max(
        opened for _, opened in reports
    )


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1000 * seconds:.1f} ms"
