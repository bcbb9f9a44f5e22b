"""The weights that training begins with: what `distribute` saw, or what a script has loaded since."""

from __future__ import annotations

from bagua.algorithms.base import Exactness, Payload
from bagua.comm.store_team import encode
from bagua.engine.loaded_weights import weight_sums
from bagua.engine.parts import ExchangeParts, TrainingParts

__all__ = ["FirstWeights"]


class FirstWeights:
    """Lets an algorithm begin with the weights and moments of the first step.

    Attributes:
        settled: nothing is to be done before the next step, since training has begun.
    """

    def __init__(self, training: TrainingParts, exchanges: ExchangeParts) -> None:
        self.settled = False
        self._key, self._state, self._team = training.key, training.state, training.team
        self._dispatcher, self._failures, self._ctx = exchanges.dispatcher, exchanges.failures, exchanges.context
        self._starts = 0  # how often training was begun with the weights of then

    def begin(self) -> None:
        """Before the first step: weights or moments may have been loaded since `distribute`, so begin with these.

        What ranks keep of each other's weights begins anew only if they hold the same. All ranks pass here. With fault
        tolerance weights are loaded before `distribute`, and a newcomer must not wait for the others here.
        """
        state, algorithm, tolerant = self._state, self._state.algorithm, self._failures.recovery is not None
        if self.settled or state.step or tolerant or algorithm.payload is not Payload.PARAM:
            return
        self.settled, self._starts = True, self._starts + 1
        if algorithm.keeps_weights and algorithm.exactness is not Exactness.ASYNCHRONOUS:  # which waits for nobody
            if not self._are_equal():
                state.notice("ranks begin with different weights, as they were changed since bagua.distribute()")
                return
            self._dispatcher.renew()
        algorithm.on_start(self._ctx)

    def _are_equal(self) -> bool:
        """Whether all ranks hold the same weights. Collective, through the store."""
        sums = encode(weight_sums(self._state))
        what, key = "agreement on the first weights", f"weights/{self._key}/{self._starts}"
        all_sums = self._team.all_gather_bytes_once(what, key, sums, self._failures.check_members)
        return all(each == sums for each in all_sums)
