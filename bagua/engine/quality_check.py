"""What a guard's measurement at the end of a step leads to."""

from __future__ import annotations

from functools import partial

from bagua.algorithms.base import Algorithm, Exactness, Payload
from bagua.engine.guard import Probe
from bagua.engine.lanes.label import Label
from bagua.engine.parts import ExchangeParts, TrainingParts

__all__ = ["QualityCheck"]


class QualityCheck:
    """Asks the probe of a guard in the steps that are measured.

    Args:
        probe: None: there is no guard.
    """

    def __init__(self, training: TrainingParts, exchanges: ExchangeParts, probe: Probe | None) -> None:
        self._probe, self._state, self._team = probe, training.state, training.team
        self._pool, self._dispatcher, self._memory = exchanges.pool, exchanges.dispatcher, exchanges.memory
        self._warned = False  # if nothing takes over

    def find_fallback(self) -> Algorithm | None:
        """At the end of a step, on all ranks: the algorithm that takes over, if a limit is exceeded and there is one.

        Where weights are exchanged this measures how far they are apart, with an exchange of its own.
        """
        probe, state, team = self._probe, self._state, self._team
        if probe is None or not probe.due(state.step) or team.size == 1:
            return None
        compared = (Exactness.DECENTRALIZED, Exactness.PERIODIC)
        if state.algorithm.exactness in compared and state.algorithm.payload is Payload.PARAM:
            flats, fed_back = [bucket.flat for bucket in state.buckets], state.algorithm.fed_back
            kept = [tensor for (name, _), tensor in self._memory.tensors.items() if name in fed_back]
            run = partial(probe.compare_weights, flats, kept, self._pool.groups)
            self._dispatcher.submit(run, Label(f"consensus step {state.step}", "consensus", {"step": state.step}))
            self._dispatcher.wait()
        reason = probe.measured(state.step)
        if not reason:
            return None
        fallback = probe.guard.fallback_on(self._pool.groups.nodes)
        what = f"; {fallback!r} takes over" if fallback is not None else ""
        if what or not self._warned:
            self._warned = True
            state.notice(f"step {state.step}, {state.algorithm.name}: {reason}{what}", urgent=team.rank == 0)
        return fallback
