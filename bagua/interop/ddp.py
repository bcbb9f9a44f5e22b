"""Exchanges as communication hooks of `DistributedDataParallel`.

DDP compares the annotations of a hook with its classes, so annotations are evaluated in this file.
"""

import atexit
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.algorithms import Algorithm
from bagua.comm.shutdown import before_exit
from bagua.comm.team import Team
from bagua.engine.lanes.label import Label
from bagua.engine.lanes.selection import make_lane
from bagua.errors import CommunicationError
from bagua.exchanges import Exchange, State
from bagua.interop.choice import choose, open_groups

__all__ = ["DDPHook", "ddp_hook"]

_SIGN_OF_LIFE_S = 3.0  # how long a failed rank waits for the others to fail too, before it names those that did not
_STOP_S = 1.0  # at the end of the process, for a lane that is still busy


def ddp_hook(
    exchange: str | Algorithm | Exchange = "bytegrad",
    *,
    process_group: Any = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> "DDPHook":
    """Return a DDP communication hook that reduces buckets with a Bagua exchange. Collective.

        ddp.register_comm_hook(None, bagua.interop.ddp_hook("bytegrad"))

    Exchanges run one after the other in a thread (on NCCL: a stream) with connections of its own, so any number of
    buckets may be in progress, and nothing that DDP sends in between can get into their way.

    Args:
        exchange: "gradient_allreduce", "bytegrad", "power_sgd" or an instance of these algorithms; or an exchange
            that leaves all ranks with the same values.
        process_group: that of the DDP module: a `ProcessGroup`, a one-dimensional `DeviceMesh`, or None.
        device: of the gradients; None is the current GPU if the group has NCCL, else the CPU.
        **options: of the named algorithm.

    Returns:
        The hook. It serves one module.

    Raises:
        ValueError, TypeError: an argument is wrong. `RankMismatchError` (a ValueError): ranks chose differently.
        CommunicationError: a rank did not arrive within the timeout.

    Examples:
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 1))
        >>> hook = bagua.interop.ddp_hook("bytegrad")
        >>> ddp.register_comm_hook(None, hook)
        >>> ddp(inputs).square().mean().backward()
    """
    chosen = choose(exchange, options)
    where = _device_of(process_group) if device is None else torch.device(device)
    return DDPHook(chosen, Team.of(process_group, where), where)


@dataclass(eq=False)
class _Slot:
    """State of one bucket, kept as long as the bucket has the same parameters."""

    params: tuple[int, ...]
    exchange: Exchange
    state: State


class DDPHook:
    """See `ddp_hook`. Residuals start at zero whenever DDP rebuilds its buckets, and are not saved."""

    def __init__(self, chosen: Algorithm | Exchange, team: Team, device: torch.device) -> None:
        self.__name__ = self.__qualname__ = "bagua_hook"  # DDP logs it
        self._team, self._device = team, device
        groups, self._exchange_for = open_groups(team, chosen, "bagua.interop.ddp_hook()", device)
        self._lane = make_lane(groups, device)
        self._failures = _Failures(team, f"ddp/{team.counters.lanes}")
        self._slots: dict[int, _Slot] = {}
        self._num_calls = 0
        _live.add(self)
        before_exit(_stop_lanes)
        atexit.unregister(_stop_lanes)
        atexit.register(_stop_lanes)

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Launch the exchange of `bucket`; the future returns its buffer. `state` is not used.

        Raises (the future, hence `backward()`):
            RuntimeError: with the text of a `CommunicationError` that says what failed, and names ranks that are gone.
        """
        flat = bucket.buffer()
        if flat.device.type != self._device.type:
            raise ValueError(
                f"ddp_hook: made for {self._device.type} gradients, got {flat.device.type} ones; pass `device`"
            )
        slot = self._slot(bucket, flat)
        lane, failures, step = self._lane, self._failures, self._num_calls
        self._num_calls += 1
        devices: list[Any] = [flat.device] if flat.device.type == "cuda" else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        groups, text = lane.groups, f"{slot.exchange.name} bucket {bucket.index()}"
        label = Label(text, slot.exchange.name, {"step": step, "bucket": bucket.index(), "bytes": flat.nbytes})

        def job() -> None:  # must not raise: the lane would not run the next job, whose future would never be done
            try:
                if failures.text is None and groups.size > 1:
                    with torch.no_grad():
                        groups.begin(bucket.index())
                        slot.exchange.run(flat, slot.state, groups, step)
            except BaseException as error:
                failures.text = f"{text}: {type(error).__name__}: {error}"
                groups.leave(abort=True)  # closes the connections, so that peers fail soon too
                failures.find_out()
            future.set_result(flat)

        # An exception set on the future itself would reach DDP as a result; one raised by a callback is an error.
        delivered = future.then(failures.check)
        lane.submit(job, label)
        return delivered

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far."""
        return sum(meter.sent for meter in self._lane.groups.meters)

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """End the lane; a module with this hook can no longer train."""
        self._lane.stop(timeout_s)

    def _slot(self, bucket: dist.GradBucket, flat: Tensor) -> _Slot:
        params = tuple(id(param) for param in bucket.parameters())
        slot = self._slots.get(bucket.index())
        if slot is None or slot.params != params:  # DDP makes its buckets anew after the first pass
            exchange = self._exchange_for(bucket.gradients())
            slot = _Slot(params, exchange, exchange.init(flat, self._lane.groups))
            self._slots[bucket.index()] = slot
        return slot


class _Failures:
    """The first failure, and the ranks that are missing."""

    def __init__(self, team: Team, key: str) -> None:
        self.text: str | None = None
        self._team, self._key = team, key

    def find_out(self) -> None:
        """Wait a few seconds for the other ranks to fail too, and record the ranks that do not."""
        self.text = f"{self.text}{self._team.describe_missing(self._key, _SIGN_OF_LIFE_S)}"

    def check(self, future: torch.futures.Future[Tensor]) -> Tensor:
        """The future's value, unless something has failed."""
        if self.text is not None:
            raise CommunicationError(f"rank {self._team.rank}, {self.text}")
        return future.value()


_live: weakref.WeakSet[DDPHook] = weakref.WeakSet()


def _stop_lanes() -> None:
    """Stop lanes at exit: threads inside a collective at interpreter shutdown would abort the process."""
    for hook in list(_live):
        hook.stop()


def _device_of(process_group: Any) -> torch.device:
    if torch.cuda.is_available():
        gpu = torch.device("cuda", torch.cuda.current_device())
        try:
            team = Team.of(process_group, gpu)
        except ValueError:
            return torch.device("cpu")
        if team.backend == "nccl":  # gloo carries both; then it is for CPU tensors, as without a GPU
            return gpu
    return torch.device("cpu")
