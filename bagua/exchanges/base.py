"""The interface of all exchanges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bagua.codecs import Codec
from bagua.comm.buffers import Buffers
from bagua.comm.groups import Groups
from bagua.exchanges.payload_source import PayloadSource

__all__ = ["Exchange", "State", "check_codec"]

State = dict[str, Tensor]
"""Tensors that an exchange keeps for one bucket from step to step, by name: a dict."""


@dataclass(frozen=True)
class Exchange(ABC):
    """Reduces a flat tensor over the ranks, in place.

    A specification: it holds options and no tensors. State that lasts from step to step is in the `State` that
    `init` creates, one per bucket; scratch memory comes from `groups.buffers`. With a single rank an exchange
    is the identity, unless it `runs_alone`; the engine then does not even run it.
    """

    @property
    def name(self) -> str:
        """A readable name for traces and logs."""
        return type(self).__name__

    @property
    def hierarchical(self) -> bool:
        """Whether the exchange needs `groups.intra` and `groups.inter`."""
        return False

    @property
    def complete(self) -> bool:
        """Whether every rank ends with the same values, made from all ranks' values."""
        return True

    @property
    def lossy(self) -> bool:
        """Whether the result is an approximation of the exact mean (or sum) of all ranks."""
        return False

    @property
    def elementwise(self) -> bool:
        """Whether slices of a tensor may be exchanged separately, each with its own state, on several lanes."""
        return False

    @property
    def streaming(self) -> bool:
        """Whether it only moves bytes, so that on a fast link one lane is as fast as several."""
        return False

    @property
    def two_phases(self) -> bool:
        """Whether `run` is `begin` and then `finish`, and leaves the payload alone after `begin`."""
        return False

    @property
    def runs_alone(self) -> bool:
        """Whether it does something with a single rank, too."""
        return False

    @property
    def fed_back(self) -> tuple[str, ...]:
        """Names of the state's tensors with errors of this rank that are added to what it sends later.

        With `fault_tolerant` they outlive a change of the members. The tensors of a payload's parts, one after the
        other, must have as many elements however it is cut into parts.
        """
        return ()

    @property
    def scales_with_payload(self) -> tuple[str, ...]:
        """Names of the state's tensors that are as many times larger as the payload, such as errors to feed back.

        Where payloads are gradients, they are multiplied when a gradient scaler changes the loss scale. Include those
        of `fed_back`.
        """
        return self.fed_back

    @property
    def outdated(self) -> tuple[str, ...]:
        """Names of the state's tensors that earlier versions saved, or other numbers of ranks; ignored on loading."""
        return ()

    @property
    def layout(self) -> tuple[str, ...]:
        """Names of the state's tensors that say what the others are of. What is loaded must have equal ones."""
        return ()

    @property
    def num_means(self) -> int:
        """Means that it forms one after the other."""
        return 1

    def fit(self, name: str, saved: Tensor, made: Tensor, groups: Groups) -> Tensor | None:
        """What to load of a `saved` tensor of the state whose shape is not that of `made`; None: it does not fit."""
        return None

    def init(self, x_N: Tensor, groups: Groups) -> State:
        """Make the state for a bucket like `x_N`. Called once, when the algorithm is bound, on all ranks."""
        return {}

    def rebuild(self, x_N: Tensor, state: State, groups: Groups) -> None:
        """Complete the `state` that `init` has made, where the ranks hold different `x_N`. Collective; may block.

        For state that holds other ranks' values. Called with `fault_tolerant` when groups are opened anew.
        """

    @abstractmethod
    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Reduce `x_N` in place. Called on all ranks in the same order; may block."""

    @property
    def encodes(self) -> bool:
        """Whether there is `run_encoded`, so that a result can be passed on in fewer bytes than the payload's."""
        return False

    def run_encoded(self, x_N: Tensor, state: State, groups: Groups, step: int) -> Sequence[Tensor]:
        """As `run`, among several ranks. Returns encoded tensors of which `read_encoded` makes the result elsewhere.

        They are scratch memory, as many and as long on all ranks as `encoded_shape` says.
        """
        raise NotImplementedError(f"{self.name} has no encoded results")

    def encoded_shape(self, n: int, size: int) -> tuple[int, int]:
        """Number and bytes of the tensors that `run_encoded` returns for `n` elements among `size` ranks."""
        raise NotImplementedError(f"{self.name} has no encoded results")

    @property
    def addend_codec(self) -> Codec | None:
        """With `run_encoded`: what the addends of a sum over a site may be encoded with first; None: nothing."""
        return None

    @property
    def of_results(self) -> tuple[str, ...]:
        """Names of the state's tensors that results determine, an element for each one of the payload.

        With `run_encoded`, who reads the results keeps them, too.
        """
        return ()

    def read_encoded(self, encoded_KW: Tensor, x_N: Tensor, state: State, size: int, buffers: Buffers) -> None:
        """Write the result of `run_encoded` among `size` other ranks into `x_N`.

        Args:
            encoded_KW: what it returned there.
            state: what `of_results` names, as it is there; it is updated as there.
            buffers: for scratch.
        """
        raise NotImplementedError(f"{self.name} has no encoded results")

    def begin(self, x_N: Tensor, state: State, groups: Groups, held: State) -> None:
        """With `two_phases`: all of `run` that reads or changes `x_N`; waits for ranks of its node or site at most.

        Args:
            held: kept from here to `finish`, and to the next `begin`; empty at first.
        """
        raise NotImplementedError(f"{self.name} has no phases")

    def finish(self, state: State, groups: Groups, held: State) -> None:
        """With `two_phases`: the rest of `run`; may block."""
        raise NotImplementedError(f"{self.name} has no phases")

    def reads(self, x_N: Tensor) -> bool:
        """Whether `run_from` is faster than `run` for a payload like `x_N`."""
        return False

    def run_from(self, source: PayloadSource, state: State, groups: Groups, step: int) -> None:
        """As `run` of `source.x_N`, whose elements may still lie elsewhere."""
        n = source.x_N.numel()
        source.fill(0, n)
        self.run(source.x_N, state, groups, step)
        source.leave(0, n)

    def memory(self, state: State, n: int, lo: int, hi: int, groups: Groups) -> Sequence[Tensor]:
        """Views of what `state` remembers of elements `lo` to `hi` of a payload of `n`, such as errors to feed back.

        The result of an exchange is thrown away for parameters that no rank used; what these views held before is then
        put back, so that no error that was fed back is lost. By default every tensor of `n` elements is taken to hold
        one for each element of the payload.
        """
        return [tensor.view(-1)[lo:hi] for tensor in state.values() if tensor.numel() == n]

    @abstractmethod
    def bytes_per_rank(self, n: int, size: int) -> float:
        """Bytes that a rank sends for `n` fp32 elements among `size` ranks (the mean over the ranks)."""


def check_codec(exchange: str, codec: object, argument: str = "codec") -> None:
    """Refuse what is no codec, such as its name.

    Args:
        argument: of the exchange, that it is.

    Raises:
        TypeError: names the exchange.
    """
    if not isinstance(codec, Codec):
        made = "bagua.codecs.get() makes one by its name"
        raise TypeError(f"{exchange}: {argument}: expected a Codec, got {codec!r}; {made}")
