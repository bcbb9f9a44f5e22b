"""Averaging of replicas whose weights may differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bagua.algorithms.base import Algorithm, Exactness, Payload
from bagua.comm.store_team import decode, encode
from bagua.engine.averaging import mean_optimizers, mean_tensors
from bagua.engine.inference_mode import outside_inference
from bagua.engine.parts import ExchangeParts, TrainingParts
from bagua.errors import CommunicationError
from bagua.exchanges import AllReduce

__all__ = ["Replicas"]

_REMEDY = "let all ranks decide together whether to skip one, or use bagua.join"
_UNLIKE = f"if all ranks are alive, they may have made different numbers of steps or batches: {_REMEDY}"
_NAMED = 8  # ranks in a message


class Replicas:
    """Makes the ranks' weights equal to their mean: when users ask for it, and before a switch of the algorithm."""

    def __init__(self, training: TrainingParts, exchanges: ExchangeParts) -> None:
        self._state, self._inventory = training.state, training.inventory
        self._team, self._optimizers = training.team, training.optimizers
        self._dispatcher, self._memory, self._ctx = exchanges.dispatcher, exchanges.memory, exchanges.context
        self._told_of_steps = False

    @property
    def differ(self) -> bool:
        """Whether the ranks may hold different weights now; the same on all ranks."""
        return self._team.size > 1 and self._state.algorithm.replicas_differ(self._optimizers.alive)

    def average(self) -> None:
        """Make the weights equal to their mean, where they may differ. Collective."""
        if self.settle():
            # Before the exchange, so that a rank that stays away is named and breaks nothing.
            try:
                steps = self._team.all_gather_bytes("bagua.average_parameters()", encode(self._state.step))
            except CommunicationError as error:
                raise CommunicationError(f"{error}; {_UNLIKE}") from error
            if self._state.algorithm.exactness is not Exactness.ASYNCHRONOUS:  # where each makes as many as it likes
                self._compare_steps([decode(each) for each in steps])
            self.exchange()

    def _compare_steps(self, steps: Sequence[int]) -> None:
        """Warn, once, of ranks that have made more steps: exchanges of periodic algorithms may come out even."""
        if len(set(steps)) == 1 or self._told_of_steps:
            return
        self._told_of_steps = True
        self._state.notice(
            f"bagua.average_parameters: the ranks have made different numbers of optimizer steps ({_by_count(steps)}), "
            f"so {self._state.algorithm.name!r} averages weights of different steps; {_REMEDY}",
            urgent=self._team.rank == 0,
        )

    @outside_inference
    def average_copies(self, tensors: Sequence[Tensor]) -> None:
        """Make `tensors`, which each rank has formed of its weights, equal to their mean if they differ. Collective.

        They may differ where the weights do not, after a switch of the algorithm for example.
        """
        if self._team.size == 1:
            return
        self._dispatcher.check_alive()
        found = self._team.all_gather_bytes("mean of averaged models", b"" if self.differ else _digest(tensors))
        if self.differ or len(set(found)) > 1:
            with self._dispatcher.side_exchange("mean of averaged models") as group:
                mean_tensors(tensors, group, self._inventory.device)

    def settle(self) -> bool:
        """End background communication before a mean is taken. Whether the ranks may hold different weights."""
        self._dispatcher.check_alive()
        self._state.algorithm.on_pause(self._ctx)
        return self.differ

    def equalise_for(self, algorithm: Algorithm) -> None:
        """Average the replicas before switching to `algorithm`, so that no rank's updates are lost. Collective.

        Where gradients are exchanged, equal weights stay equal only if the optimizers' state is equal.
        """
        self._state.algorithm.on_pause(self._ctx)
        if self.differ:
            self.exchange()
            if algorithm.payload is Payload.GRAD:
                self._average_optimizers()

    def equalise(self) -> None:
        """Average weights and the optimizers' state, whatever algorithm runs. Collective."""
        if self._team.size > 1:
            self.exchange()
            self._average_optimizers()

    def _average_optimizers(self) -> None:
        params, device = self._inventory.parameters, self._inventory.device
        with self._dispatcher.side_exchange("mean of optimizer state") as group:
            mean_optimizers(self._optimizers.alive, params, self._team, group, device)

    def exchange(self) -> None:
        """Make the weights equal to their mean. Collective; after a failure they are neither their own nor the mean."""
        state, dispatcher, states = self._state, self._dispatcher, self._memory.states
        if state.algorithm.payload is Payload.GRAD:
            params, device = list(self._inventory.parameters.values()), self._inventory.device
            if self._ctx.fault_tolerant:  # what runs on a lane ends when a rank is lost
                dispatcher.submit(partial(mean_tensors, params, self._ctx.groups.world, device), "mean of the weights")
                dispatcher.wait()
                return
            with dispatcher.side_exchange("mean of the weights") as group:
                mean_tensors(params, group, device)
            return
        exchange, known = AllReduce(), set(states)
        for bucket in state.buckets:
            if (exchange, bucket.index, 0) not in known:
                dispatcher.prepare(exchange, bucket)
            dispatcher.launch(exchange, bucket)
        dispatcher.wait()
        for key in set(states) - known:
            del states[key]


def _by_count(steps: Sequence[int]) -> str:
    found: list[str] = []
    for count in sorted(set(steps), reverse=True):
        ranks = [str(rank) for rank, other in enumerate(steps) if other == count]
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        found.append(f"{count} on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks[:_NAMED])}{more}")
    return "; ".join(found)


def _digest(tensors: Sequence[Tensor]) -> bytes:
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return made.digest()
