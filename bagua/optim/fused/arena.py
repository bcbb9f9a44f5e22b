"""`Arena`: parameters in one flat tensor, and the ranges of it that the optimizer steps."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bagua.optim.fused.memory import have_equal_order, is_bound
from bagua.optim.fused.slots import Slot, is_scalar, same_scalars
from bagua.optim.fused.unit import Unit, cut

__all__ = ["Arena", "Kind"]

Kind = Literal["gathered", "mirrored", "direct"]


class Arena:
    """Some parameters of one group, dtype and device, in one flat tensor.

    Args:
        params: in the order in which they lie.
        positions: of `params` among all the optimizer's parameters.
        group: number of their parameter group.
        flat: [N], their values; `params` are views of it.
        moved: whether `flat` is memory of ours.
        offsets: where in `flat` each begins.
        kind: "gathered": gradients are views of a flat tensor of our own, those that are not are copied there;
            "mirrored": gradients lie in somebody else's flat tensor in the same order, `grads` are the views;
            "direct": one parameter, whose gradient is taken as it is.
        chunk: how many elements the optimizer sees as one parameter; None: all.
        place_counts: whether results depend on strides, so that gradients must have those of the parameters.
        state: flat tensors [N] by key.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        positions: Sequence[int],
        group: int,
        flat: Tensor,
        moved: bool,
        offsets: Sequence[int],
        kind: Kind,
        chunk: int | None,
        grads: Sequence[Tensor] = (),
        place_counts: bool = False,
    ) -> None:
        self.params, self.positions, self.group = list(params), list(positions), group
        self.flat, self.moved, self.offsets, self.kind, self.chunk = flat, moved, list(offsets), kind, chunk
        self._place_counts = place_counts
        self.numels = [param.numel() for param in params]
        self.state: dict[Any, Tensor] = {}
        self.units: list[Unit] = []
        self.unit_of: list[Unit | None] = [None] * len(self.params)  # also of those that have no gradient now
        self._present: list[bool] | None = None
        self._full = False
        self._before: weakref.ref[Tensor] | None = None  # the first gradient copied at the last step
        self._pick = _picker(positions)
        self._attributes = vars(params[0]).copy()
        self.grad: Tensor | None = None
        self.grads = list(grads)
        self._views: dict[Any, list[Tensor]] = {}
        self._vectors: dict[Any, tuple[Tensor, list[Tensor]]] = {}
        if kind == "mirrored":
            storage = self.grads[0].untyped_storage()
            start = self.grads[0].storage_offset()
            self.grad = torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, start, flat.shape, (1,))
        elif kind == "gathered":
            self.grad = torch.zeros_like(flat)
            self.grads = self.split(self.grad)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of `flat`, in its shape and strides; no views for autograd, as those of buckets."""
        start = flat.storage_offset()
        return [
            flat.as_strided(param.size(), param.stride(), start + offset).detach()
            for param, offset in zip(self.params, self.offsets, strict=True)
        ]

    # -- gradients -----------------------------------------------------------------------------------------------

    def collect(self, grads: Sequence[Tensor | None], adopt: bool) -> bool:
        """Collect this step's gradients in `grad`, and return units of the parameters that have one.

        Args:
            grads: of all the optimizer's parameters.
            adopt: make `param.grad` our view where a gradient is kept from step to step (`set_to_none=False`), so
                that it need not be copied again; unless one lies in somebody's bucket.

        Returns:
            False if the gradients do not lie as they should; nothing has been changed then.

        Raises:
            RuntimeError: a gradient is not dense.
        """
        now: Sequence[Tensor | None] = self._pick(grads)
        if self.kind == "direct" or not self._full or not all(map(operator.is_, now, self.grads)):
            present = [grad is not None for grad in now]
            if self.kind == "direct":
                self._take(now[0])
            elif not self._gather(now, adopt):
                return False
            if present != self._present:
                self._make_units(present)
                self._present, self._full = present, all(present)
        if self.kind == "direct" and self.grad is not None:
            grad = self.grad
            for unit in self.units:
                for piece, (lo, hi) in zip(unit.pieces, unit.bounds, strict=True):
                    piece.grad = grad[lo:hi]
        return True

    def _gather(self, now: Sequence[Tensor | None], adopt: bool) -> bool:
        views, params = self.grads, self.params
        if not all(map(operator.is_not, now, views)) or not all(map(torch.is_tensor, now)):
            new = [i for i, grad in enumerate(now) if grad is not None and grad is not views[i]]
            if not new:
                return True
            now, views, params = [now[i] for i in new], [views[i] for i in new], [params[i] for i in new]
        if self.kind == "mirrored":
            return False
        fresh = [grad for grad in now if grad is not None]
        _check_layouts(fresh)
        if set(map(operator.attrgetter("dtype"), fresh)) != {self.flat.dtype}:
            return False  # a copy would round them before the optimizer computes
        if self._place_counts and not all(map(have_equal_order, fresh, params)):
            return False
        torch._foreach_copy_(views, fresh)
        kept = self._before is not None and self._before() is fresh[0]
        if adopt and kept and not any(map(is_bound, fresh)):
            self._before = None
            for param, view in zip(params, views, strict=True):
                param.grad = view
        else:
            self._before = weakref.ref(fresh[0])
        return True

    def _take(self, grad: Tensor | None) -> None:
        param = self.params[0]
        if grad is None:
            self.grad = None
            return
        _check_layouts([grad])
        if grad.stride() != param.stride():
            grad = torch.empty_like(param, memory_format=torch.preserve_format).copy_(grad)
        self.grad = grad.as_strided(self.flat.shape, (1,))

    def let_go(self) -> None:
        """Drop references to foreign gradients, so that `zero_grad` frees them."""
        if self.kind == "direct":
            self.grad = None
            for unit in self.units:
                for piece in unit.pieces:
                    piece.grad = None

    # -- units ---------------------------------------------------------------------------------------------------

    def piece(self, lo: int, hi: int) -> nn.Parameter:
        """A parameter for the optimizer to see."""
        made = nn.Parameter(self.flat[lo:hi], requires_grad=True)
        vars(made).update(self._attributes)
        if self.grad is not None:
            made.grad = self.grad[lo:hi]
        return made

    def restrict(self, slot: Mapping[Any, Any], lo: int, hi: int) -> Slot:
        """The slot of the range `lo` to `hi` with the scalars of `slot`."""
        made: Slot = {}
        for key, value in slot.items():
            if key in self.state:
                made[key] = self.state[key][lo:hi]
            else:
                made[key] = value.clone() if isinstance(value, Tensor) else value
        return made

    def assign(self, first: int, last: int, slot: Mapping[Any, Any]) -> None:
        """Assign the scalars of `slot` to the parameters from `first` to `last` (exclusive)."""
        self.unit_of[first:last] = [Unit(first, last, [dict(slot)])] * (last - first)

    def _make_unit(self, first: int, last: int, like: Unit | None) -> Unit:
        lo, hi = self.offsets[first], self.offsets[last - 1] + self.numels[last - 1]
        bounds = cut(lo, hi, self.chunk)
        old = like.slots[0] if like is not None else {}
        slots = [self.restrict(old, *bound) for bound in bounds]
        return Unit(first, last, slots, bounds, [self.piece(*b) for b in bounds], [dict(slot) for slot in slots])

    def _make_units(self, present: Sequence[bool]) -> None:
        before = self.unit_of
        runs: list[tuple[int, int, Unit | None]] = []
        position = 0
        for (there, _), members in groupby(zip(present, map(id, before), strict=True)):
            end = position + sum(1 for _ in members)
            if there:
                unit = before[position]
                if runs and runs[-1][1] == position and self._alike(runs[-1][2], unit):
                    runs[-1] = (runs[-1][0], end, runs[-1][2])
                else:
                    runs.append((position, end, unit))
            position = end
        self.units = [self._make_unit(first, last, like) for first, last, like in runs]
        for unit in self.units:
            self.unit_of[unit.first : unit.last] = [unit] * (unit.last - unit.first)

    def _alike(self, one: Unit | None, other: Unit | None) -> bool:
        if one is other:
            return True
        a: Slot = one.slots[0] if one is not None else {}
        b: Slot = other.slots[0] if other is not None else {}
        return same_scalars(a, b, set(self.state))

    # -- state ---------------------------------------------------------------------------------------------------

    def absorb(self, slots: Mapping[Any, Slot]) -> None:
        """After a step: keep what the optimizer wrote for our pieces.

        Raises:
            RuntimeError: it wrote something that is neither element-wise nor scalar.
        """
        for unit in self.units:
            for number, (piece, (lo, hi)) in enumerate(zip(unit.pieces, unit.bounds, strict=True)):
                slot = slots.get(piece)
                if slot is None:
                    continue
                unit.slots[number], known = slot, unit.known[number]
                for key, value in slot.items():
                    if isinstance(value, Tensor) and known.get(key) is not value:
                        slot[key] = known[key] = self._keep(key, value, piece, lo, hi)
                    elif not isinstance(value, Tensor) and not is_scalar(value):
                        raise RuntimeError(f"state {key!r} is a {type(value).__name__}; {_NOT_FLAT}")

    def _keep(self, key: Any, value: Tensor, piece: Tensor, lo: int, hi: int) -> Tensor:
        if value.shape != piece.shape:
            if value.numel() != 1:
                raise RuntimeError(f"state {key!r} has shape {list(value.shape)}; {_NOT_FLAT}")
            return value
        flat = self.flat_state(key, value.dtype)
        flat[lo:hi].copy_(value)
        return flat[lo:hi]

    def flat_state(self, key: Any, dtype: torch.dtype) -> Tensor:
        """The flat tensor of a key, made when it is new."""
        if key not in self.state:
            self.state[key] = torch.zeros_like(self.flat, dtype=dtype)
        if self.state[key].dtype != dtype:
            raise RuntimeError(
                f"state {key!r} has dtype {dtype} in one flat part and {self.state[key].dtype} in another"
            )
        return self.state[key]

    def slot_of(self, number: int) -> Slot | None:
        """The slot that the unfused optimizer would have for parameter `number`; None if it has none.

        Call `write_scalars` first. Tensors are the same objects each time.
        """
        unit = self.unit_of[number]
        if unit is None or not unit.slots[0]:
            return None
        made: Slot = {}
        for key, value in unit.slots[0].items():
            if key in self.state:
                if key not in self._views:
                    self._views[key] = self.split(self.state[key])
                made[key] = self._views[key][number]
            else:
                made[key] = self._vectors[key][1][number] if isinstance(value, Tensor) else value
        return made

    def write_scalars(self) -> None:
        """Bring each parameter's own one-element tensors up to date."""
        for unit in {id(unit): unit for unit in self.unit_of if unit is not None}.values():
            for key, value in unit.slots[0].items():
                if isinstance(value, Tensor) and key not in self.state and key not in self._vectors:
                    vector = value.new_empty((len(self.params), *value.shape))
                    self._vectors[key] = vector, list(vector.unbind())
        for first, last, unit in self._ranges():
            for key, value in unit.slots[0].items():
                if isinstance(value, Tensor) and key not in self.state:
                    self._vectors[key][0][first:last].copy_(value.detach())

    def _ranges(self) -> list[tuple[int, int, Unit]]:
        """Parameters that share a slot: positions and their unit."""
        found: list[tuple[int, int, Unit]] = []
        position = 0
        for _, members in groupby(self.unit_of, key=id):
            alike = list(members)
            if alike[0] is not None:
                found.append((position, position + len(alike), alike[0]))
            position += len(alike)
        return found


_NOT_FLAT = "only an optimizer that acts element by element can be fused"


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]:
    """What takes the items at `positions` out of a sequence."""
    if len(positions) == 1:
        first = positions[0]
        return lambda items: (items[first],)
    getter: Any = operator.itemgetter  # mypy 2.4 crashes where it is called with unpacked arguments
    return getter(*positions)


def _check_layouts(grads: Sequence[Tensor]) -> None:
    for layout in set(map(operator.attrgetter("layout"), grads)):
        if layout is not torch.strided:
            raise RuntimeError(f"a fused optimizer takes dense gradients only, got a {layout} one")
