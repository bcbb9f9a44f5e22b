"""The step of a fused optimizer: its own step, run on flat parameters."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagua.optim.fused.arena import Arena
from bagua.optim.fused.layout import LimitsFor, Place, can_be_flat, lay_out, limits_for
from bagua.optim.fused.memory import is_bound, is_part
from bagua.optim.fused.parts import PartWatch
from bagua.optim.fused.slots import Slot, is_elementwise, same_value
from bagua.optim.fused.state import StateView

__all__ = ["Stepper"]

Inner = Callable[..., Any]


class Stepper:
    """Lays an optimizer's parameters out flat and lets its own step run on them.

    The layout is made at the first step and again when parameters, their memory or their state were replaced.

    Args:
        optimizer: its `state` becomes a `StateView`. It is not held.
        limits: what may be flat, by dtype, device and options.
        move: whether parameters may be given other memory.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, limits: LimitsFor = limits_for, move: bool = True) -> None:
        self.state = StateView(self._refresh)
        self.arenas: list[Arena] = []
        self._old_arenas: list[Arena] = []
        self._our_memory: dict[int, Tensor] = {}  # flat tensors by address of their storage
        self._extra_keys: list[Any] = []  # of state that belongs to no parameter
        self._limits, self._move = limits, move
        self._laid_out = False
        self._stale = False  # the view does not show the last step yet
        self._captured = False  # a graph steps without telling us
        self._params: list[nn.Parameter] = []
        self._sizes: list[int] = []  # of the groups
        self._flat_params: list[nn.Parameter] = []  # those in arenas
        self._pointers: list[int] = []
        self._loose: list[tuple[int, nn.Parameter]] = []  # group and parameter
        self._parts = PartWatch(self._is_foreign_part)
        self._adopt_state(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, inner: Inner, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One step; the gradients are there. `inner` is the class's own step."""
        if not self._prepare(optimizer):
            return inner(optimizer, *args, **kwargs)
        groups = optimizer.param_groups
        seen: list[list[nn.Parameter]] = [[] for _ in groups]
        for arena in self.arenas:
            for unit in arena.units:
                seen[arena.group] += unit.pieces
        for number, param in self._loose:
            seen[number].append(param)
        originals = [group["params"] for group in groups]
        slots = self._slots()
        try:
            for group, pieces in zip(groups, seen, strict=True):
                group["params"] = pieces
            optimizer.state = slots
            return inner(optimizer, *args, **kwargs)
        finally:
            for group, params in zip(groups, originals, strict=True):
                group["params"] = params
            slots = optimizer.state  # the step may have put another dict there
            optimizer.state = self.state
            self._absorb(slots)

    # -- before the step -----------------------------------------------------------------------------------------

    def _prepare(self, optimizer: torch.optim.Optimizer) -> bool:
        """Have layout and gradients ready; False if this step must be made without a layout."""
        params: list[nn.Parameter] = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [param.grad for param in params]
        if self._needs_layout(optimizer, params) or (
            not self._parts.settled and self._parts.look(grads, self._samples()) == "parts"
        ):
            self._forget_layout(optimizer)
            if not self._lay_out(optimizer, params, grads):
                return False
        for arena in self.arenas:
            if not arena.collect(grads, self._move):
                if arena.kind == "mirrored":
                    self._parts.lost()
                self._forget_layout(optimizer)
                return False
        return True

    def _needs_layout(self, optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> bool:
        if not self._laid_out or optimizer.state is not self.state:
            return True
        if [len(group["params"]) for group in optimizer.param_groups] != self._sizes:
            return True
        if not all(map(operator.is_, params, self._params)):
            return True
        if list(map(Tensor.data_ptr, self._flat_params)) != self._pointers:
            return True
        if self.state.touched:
            self.state.touched = False
            return self._changed_from_outside()
        return False

    def _forget_layout(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the state by parameter the only one. Parameters stay where they are."""
        if optimizer.state is self.state:
            self._refresh()
        self._laid_out = self._stale = False
        self._adopt_state(optimizer)

    def _adopt_state(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state is not self.state:
            self.state.raw_replace(dict(optimizer.state))
            optimizer.state = self.state
        # Kept until the new layout is made, so that what is ours is known and no address recurs.
        self._our_memory |= _moved(self.arenas)
        self._old_arenas += self.arenas
        self.arenas = []
        self._extra_keys = [key for key in self.state.plain() if not isinstance(key, Tensor)]

    def _lay_out(
        self, optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: Sequence[Tensor | None]
    ) -> bool:
        found = self._parts.look(grads, range(len(grads)))
        if found == "unsure":
            return False
        self._loose = []
        position = 0
        for number, group in enumerate(optimizer.param_groups):
            places: list[Place] = []
            for param in group["params"]:
                slot = self.state.raw_get(param)
                if can_be_flat(param, slot):
                    places.append(self._place(position, param, grads[position], found == "parts"))
                position += 1
            made = lay_out(number, group, places, self._limits)
            taken = {place for arena in made for place in arena.positions}
            start = position - len(group["params"])
            self._loose += [(number, param) for at, param in enumerate(group["params"], start) if at not in taken]
            self.arenas += made
        for arena in self.arenas:
            self._import(arena)
        self._params, self._sizes = params, [len(group["params"]) for group in optimizer.param_groups]
        self._flat_params = [param for arena in self.arenas for param in arena.params]
        self._pointers = list(map(Tensor.data_ptr, self._flat_params))
        used = {param.untyped_storage().data_ptr() for param in params if _is_plain(param)}
        self._our_memory |= _moved(self.arenas)
        self._our_memory = {pointer: flat for pointer, flat in self._our_memory.items() if pointer in used}
        self._old_arenas = []
        self._laid_out = self._stale = True
        self._refresh()
        self.state.touched = False
        return True

    def _place(self, position: int, param: nn.Parameter, grad: Tensor | None, follow: bool) -> Place:
        ours = param.untyped_storage().data_ptr() in self._our_memory
        fixed = not self._move or (is_bound(param) and not ours)
        if not follow or grad is None or not self._is_foreign_part(grad) or grad.stride() != param.stride():
            grad = None
        return Place(position, param, grad, fixed)

    def _is_foreign_part(self, grad: Tensor) -> bool:
        if grad.layout is not torch.strided or not is_part(grad):
            return False
        pointer = grad.untyped_storage().data_ptr()
        ours = (arena.grad for arena in (*self.arenas, *self._old_arenas) if arena.kind == "gathered")
        return all(flat is None or flat.untyped_storage().data_ptr() != pointer for flat in ours)

    def _samples(self) -> Sequence[int]:
        """A look at every gradient in every step would cost more than it brings."""
        return sorted({arena.positions[at] for arena in self.arenas for at in (0, -1)})

    def _import(self, arena: Arena) -> None:
        """Take the parameters' own slots over into the flat state."""
        slots: list[Slot] = [self.state.raw_get(param) or {} for param in arena.params]
        scalars = []
        for number, (param, slot) in enumerate(zip(arena.params, slots, strict=True)):
            for key, value in slot.items():
                if is_elementwise(value, param):
                    flat = arena.flat_state(key, value.dtype)
                    part = flat.as_strided(param.size(), param.stride(), arena.offsets[number])
                    if part.data_ptr() != value.data_ptr():
                        part.copy_(value)
            scalars.append(tuple((key, _number(value)) for key, value in slot.items() if key not in arena.state))
        keys = [(tuple(slot), scalar) for slot, scalar in zip(slots, scalars, strict=True)]
        first = 0
        for at in range(1, len(keys) + 1):
            if at == len(keys) or keys[at] != keys[first]:
                if slots[first]:
                    arena.assign(first, at, {k: None if k in arena.state else v for k, v in slots[first].items()})
                first = at

    # -- after the step ------------------------------------------------------------------------------------------

    def _slots(self) -> defaultdict[Any, Any]:
        """The state that the optimizer sees."""
        slots: defaultdict[Any, Any] = defaultdict(dict)
        for arena in self.arenas:
            for unit in arena.units:
                slots.update({p: s for p, s in zip(unit.pieces, unit.slots, strict=True) if s})
        for _, param in self._loose:
            slot = self.state.raw_get(param)
            if slot is not None:
                slots[param] = slot
        for key in self._extra_keys:
            slots[key] = self.state.raw_get(key)
        return slots

    def _absorb(self, slots: dict[Any, Any]) -> None:
        for arena in self.arenas:
            arena.let_go()
            arena.absorb(slots)
        for _, param in self._loose:
            if param in slots:
                self.state.raw_set(param, slots[param])
        self._extra_keys = [key for key in slots if not isinstance(key, Tensor)]
        for key in self._extra_keys:
            self.state.raw_set(key, slots[key])
        self._stale = True
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._captured = True

    @torch.no_grad()
    def _refresh(self) -> None:
        """Write each parameter's slot as the unfused optimizer would have it."""
        if not self._laid_out or not (self._stale or self._captured):
            return
        self._stale, added = False, False
        for arena in self.arenas:
            arena.write_scalars()
            for number, param in enumerate(arena.params):
                slot = arena.slot_of(number)
                if slot is None:
                    continue
                old = self.state.raw_get(param)
                if old is None:
                    self.state.raw_set(param, slot)
                    added = True
                else:
                    old.clear()
                    old.update(slot)
        if added:  # in the order in which the unfused optimizer would have made them
            slots = self.state.plain()
            ordered = {param: slots.pop(param) for param in self._params if param in slots}
            self.state.raw_replace({**ordered, **slots})

    def _changed_from_outside(self) -> bool:
        """Whether the slots are not as `_refresh` wrote them."""
        self._extra_keys = [key for key in self.state.plain() if not isinstance(key, Tensor)]
        if self._captured:
            return False  # a graph has stepped since then
        for arena in self.arenas:
            for number, param in enumerate(arena.params):
                slot, shown = arena.slot_of(number), self.state.raw_get(param)
                if (slot or {}).keys() != (shown or {}).keys():
                    return True
                unit = arena.unit_of[number]
                if unit is None or not shown or not slot:
                    continue
                for key, value in slot.items():
                    if isinstance(value, Tensor):
                        scalar = key not in arena.state
                        if shown[key] is not value or (scalar and not same_value(value, unit.slots[0][key])):
                            return True
                    elif not same_value(value, shown[key]):
                        return True
        return False


def _moved(arenas: Sequence[Arena]) -> dict[int, Tensor]:
    return {arena.flat.untyped_storage().data_ptr(): arena.flat for arena in arenas if arena.moved}


def _is_plain(param: Tensor) -> bool:
    return param.layout is torch.strided and type(param.data) is Tensor


def _number(value: Any) -> Any:
    """A scalar as something to compare."""
    kind, plain = (value.dtype, value.tolist()) if isinstance(value, Tensor) else (type(value), value)
    return str(kind), repr(plain)
