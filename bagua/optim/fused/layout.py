"""Layout: which parameters are placed in flat tensors, and which stay separate.

A parameter that lies in memory of its own may be moved, one that is part of something larger stays there.

    gradients lie in somebody's flat buckets  -> parameters are moved into the same order ("mirrored")
    parameters lie in somebody's flat buckets -> neighbours there are taken together, gradients are gathered
    neither                                   -> small parameters are moved together, gradients are gathered
    large ones                                -> as they are, or in pieces if that keeps them in the processor's cache
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bagua.optim.fused.arena import Arena, Kind
from bagua.optim.fused.memory import dense_view, have_equal_order, is_dense
from bagua.optim.fused.slots import fits, is_elementwise

__all__ = ["Limits", "LimitsFor", "Place", "can_be_flat", "lay_out", "limits_for"]

_SMALL = 32768  # elements; copying a gradient of so many costs about as much as a step's operations on it do to start
_SMALL_CUDA = 1 << 20
# Elements of one thread's share. What a step reads and writes of them, temporaries included, stays in the cache, the
# allocator has memory for the temporaries at hand, and the operations hardly notice how often they start.
_PER_THREAD = 1 << 18
_VECTOR_BYTES = 64  # the longest vector there is; torch's kernels of a whole step give each thread a multiple of it
_LOOP_BYTES = 2 * _VECTOR_BYTES  # what torch's other CPU kernels take at once; they compute the rest one by one
_SERIAL = 32768  # elements; torch's CPU kernels give more than that to several threads, each with a rest of its own
_PLACELESS = torch.float32, torch.float64  # torch's optimizers give them equal bits in vectors and one by one
_ALIGN_BYTES = 16  # vector loads of the kernels that use the parameters
_SHORT_RUN = 4  # parameters; shorter runs on average are not worth following somebody else's order


@dataclass(frozen=True)
class Limits:
    """Size thresholds of the layout.

    Attributes:
        small: parameters of up to so many elements are moved together.
        chunk: how many elements the optimizer sees as one parameter; None: any number.
        multiple_bytes: parameters of a size that this does not divide are left as they are.
        longest: parameters of more elements are left as they are; None: of no number.
    """

    small: int
    chunk: int | None
    multiple_bytes: int = 1
    longest: int | None = None

    def include(self, param: Tensor) -> bool:
        """Whether the parameter may be part of a flat one."""
        return param.nbytes % self.multiple_bytes == 0 and (self.longest is None or param.numel() <= self.longest)

    @property
    def place_counts(self) -> bool:
        """Whether an element's bits depend on whether it lies within a tensor or at its end, and on strides."""
        return self.multiple_bytes > 1


LimitsFor = Callable[[torch.dtype, torch.device, Mapping[str, Any]], Limits]


def limits_for(dtype: torch.dtype, device: torch.device, group: Mapping[str, Any]) -> Limits:
    """Limits for parameters of a group of this dtype on a device.

    On a CPU the operations of a step, one after the other, are bound by memory unless each works on a range that
    stays in the cache. Where an operation runs over all pieces before the next begins (`foreach=True`), or one kernel
    does the whole step (`fused=True`), that is of no use. And such a kernel rounds the elements that fill no vector at
    a tensor's end otherwise than the others. So do some kernels of half-precision and complex numbers (`add` with
    `alpha`; complex products): flat parameters and pieces of these begin and end where a vector does, and no kernel
    cuts them for threads, however many there will be.
    """
    if device.type != "cpu":
        return Limits(_SMALL_CUDA, None)
    if group.get("fused"):
        return Limits(_SMALL, None, _VECTOR_BYTES)
    if dtype not in _PLACELESS:
        return Limits(_SMALL, _SERIAL, _LOOP_BYTES, _SERIAL)
    return Limits(_SMALL, None if group.get("foreach") else _PER_THREAD * torch.get_num_threads())


@dataclass(frozen=True)
class Place:
    """A parameter and its place in memory.

    Attributes:
        position: among all of the optimizer's parameters.
        grad: its gradient if that is part of somebody's flat tensor, with the parameter's strides.
        fixed: it must not be moved.
    """

    position: int
    param: nn.Parameter
    grad: Tensor | None
    fixed: bool


def can_be_flat(param: Tensor, slot: Mapping[Any, Any] | None) -> bool:
    """Whether the parameter is a dense plain tensor of several elements, with a state that a flat one can have."""
    if param.layout is not torch.strided or type(param.data) is not Tensor or param.numel() < 2 or param.is_meta:
        return False
    if param.device.type == "cpu" and param.is_shared():
        return False  # other processes look at that memory
    if not slot:
        return is_dense(param)
    return is_dense(param) and fits(slot, param) and (param.dtype in _PLACELESS or _lies_like(slot, param))


def _lies_like(slot: Mapping[Any, Any], param: Tensor) -> bool:
    """Whether a kernel runs through parameter and state as through vectors."""
    return all(have_equal_order(value, param) for value in slot.values() if is_elementwise(value, param))


def lay_out(group: int, options: Mapping[str, Any], places: Sequence[Place], limits: LimitsFor) -> list[Arena]:
    """Arenas for the parameters of a group; those in none of them are left as they are."""
    kinds: dict[Any, list[Place]] = {}
    for place in places:
        param = place.param
        attributes = tuple(sorted((name, _token(value)) for name, value in vars(param).items()))
        kinds.setdefault((param.dtype, param.device, attributes), []).append(place)
    arenas: list[Arena] = []
    for (dtype, device, _), alike in kinds.items():
        within = limits(dtype, device, options)
        arenas += _lay_out_alike(group, [place for place in alike if within.include(place.param)], within)
    return arenas


def _lay_out_alike(group: int, places: Sequence[Place], limits: Limits) -> list[Arena]:
    mirrored = [place for place in places if place.grad is not None and not place.fixed]
    runs = _runs(mirrored, [place.grad for place in mirrored if place.grad is not None])
    if len(runs) * _SHORT_RUN > len(mirrored):
        runs, mirrored = [], []
    arenas = [_arena(group, run, "mirrored", limits) for run in runs]
    taken = {place.position for place in mirrored}
    rest = [place for place in places if place.position not in taken]
    large = [place for place in rest if place.param.numel() > limits.small]
    small = [place for place in rest if place.param.numel() <= limits.small]
    movable = [place for place in small if not place.fixed]
    fixed = [place for place in small if place.fixed]
    groups = [movable, *_runs(fixed, [place.param for place in fixed])]
    arenas += [_arena(group, run, "gathered", limits) for run in groups if len(run) > 1]
    if limits.chunk is not None:
        arenas += [_arena(group, [p], "direct", limits) for p in large if p.param.numel() > limits.chunk]
    return arenas


def _runs(places: Sequence[Place], tensors: Sequence[Tensor]) -> list[list[Place]]:
    """Cut `places` into runs whose `tensors` follow each other in one storage without a gap."""
    keyed = sorted(
        ((tensor.untyped_storage().data_ptr(), tensor.data_ptr(), tensor.nbytes, place.position, place))
        for place, tensor in zip(places, tensors, strict=True)
    )
    runs: list[list[Place]] = []
    expected: tuple[int, int] | None = None
    for storage, pointer, nbytes, _, place in keyed:
        if (storage, pointer) == expected:
            runs[-1].append(place)
        else:
            runs.append([place])
        expected = storage, pointer + nbytes
    return runs


def _arena(group: int, places: Sequence[Place], kind: Kind, limits: Limits) -> Arena:
    """Move the parameters into one flat tensor, unless they lie in one already."""
    params = [place.param for place in places]
    offsets: list[int] = []
    numel = 0
    align = 1 if kind == "mirrored" or places[0].fixed else max(1, _ALIGN_BYTES // params[0].element_size())
    for param in params:
        offsets.append(numel)
        numel += -(-param.numel() // align) * align
    first = params[0]
    if kind == "direct":
        flat = dense_view(first)
    elif places[0].fixed:
        flat = first.detach().as_strided((numel,), (1,), first.storage_offset())
    else:
        flat = _move(params, offsets, numel)
    grads = [place.grad for place in places if place.grad is not None] if kind == "mirrored" else ()
    moved = kind != "direct" and not places[0].fixed
    positions = [place.position for place in places]
    return Arena(params, positions, group, flat, moved, offsets, kind, limits.chunk, grads, limits.place_counts)


@torch.no_grad()
def _move(params: Sequence[nn.Parameter], offsets: Iterable[int], numel: int) -> Tensor:
    flat = torch.zeros(numel, dtype=params[0].dtype, device=params[0].device)
    for param, offset in zip(params, offsets, strict=True):
        view = flat.as_strided(param.size(), param.stride(), offset)
        view.copy_(param)
        param.data = view
    return flat


def _token(value: Any) -> Any:
    """Equal for values that an optimizer cannot tell apart."""
    return repr(value) if isinstance(value, bool | int | float | str | type(None)) else f"object {id(value)}"
