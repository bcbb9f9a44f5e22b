"""The average of FSDP2's replicas, as its all-reduce hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.comm.groups import Groups
from bagua.engine.state_dict import check_layout
from bagua.exchanges import Exchange, State
from bagua.interop.choice import ExchangeFor
from bagua.interop.fsdp_params import ReducedParams

__all__ = ["Replica"]

_MOST_SETS = 8  # of parameters that states are kept for: routing may use another set in every step


class Replica:
    """The all-reduce hook of one FSDP module: averages what is reduced within a replica with the other replicas."""

    def __init__(self, exchange_for: ExchangeFor, groups: Groups, params: ReducedParams) -> None:
        self.states: dict[tuple[str, ...], State] = {}  # by names of parameters, the latest last
        self._fits: dict[tuple[str, ...], tuple[torch.dtype, torch.device]] = {}  # of the gradients of each state
        self._exchange_for, self._groups, self._params, self._step = exchange_for, groups, params, 0

    def state_dict(self) -> list[dict[str, Any]]:
        """The states as plain data; copies."""
        return [{"parameters": list(names), "tensors": _copies(state)} for names, state in self.states.items() if state]

    def load(self, saved: Sequence[Mapping[str, Any]] | Mapping[int, State], path: str) -> None:
        """Take states that may have been made for gradients of another dtype, or on another device.

        Raises:
            ValueError: they do not fit the module `path`.
        """
        states: dict[tuple[str, ...], State] = {}
        if isinstance(saved, Mapping):  # by number of elements, as earlier versions saved it
            for size, state in saved.items():
                if state:
                    states[self._params.all_of(size, path)] = _copies(state)
        else:
            for entry in saved:
                states[self._params.names_of(entry["parameters"], path)] = _copies(entry["tensors"])
        self.states, self._fits = states, {}

    @torch.no_grad()
    def __call__(self, reduce_output: Tensor) -> None:
        flat, groups = reduce_output.view(-1), self._groups
        exchange = self._exchange_for([flat])
        state = self._state(exchange, flat)
        if groups.size > 1:
            exchange.run(flat, state, groups, self._step)
        self._step += 1

    def _state(self, exchange: Exchange, flat: Tensor) -> State:
        """The state for gradients like `flat`. Their dtype is FSDP's choice: from torch 2.15 on not `param_dtype`."""
        names, fits = self._params.of_shard(flat.numel()), (flat.dtype, flat.device)
        if self._fits.get(names) != fits:
            fresh = exchange.init(flat, self._groups)
            kept, where = self.states.get(names, fresh), f"state for gradients of {flat.numel()} elements"
            check_layout(exchange, kept, fresh, where)
            fitted = dict[str, Tensor]()
            for name, each in kept.items():
                made = fresh.get(name, flat)
                same = each.shape == made.shape or name not in fresh
                found = each if same else exchange.fit(name, each, made, self._groups)
                if found is None:
                    raise ValueError(f"{where}: {name} has shape {list(each.shape)}, not {list(made.shape)}")
                fitted[name] = found.to(made)
            self._fits[names] = fits
            self.states[names] = fitted
        state = self.states[names] = self.states.pop(names)
        if len(self.states) > _MOST_SETS:
            oldest = next(iter(self.states))
            del self.states[oldest]
            self._fits.pop(oldest, None)
        return state


def _copies(state: Mapping[str, Tensor]) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}
