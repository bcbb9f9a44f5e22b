"""DeMo: decoupled momentum optimization, whose ranks share the largest frequencies of their momenta."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from bagua import codecs
from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness
from bagua.algorithms.registry import register
from bagua.codecs import Codec, PackedTopK
from bagua.exchanges import AllGather, Exchange

__all__ = ["DeMo"]


@register
@dataclass(frozen=True)
class DeMo(Algorithm):
    """Each rank keeps a momentum of its own, sends its largest frequencies and takes what it has sent out of it.

    With the momentum m_r of rank r, the orthonormal cosine transform C of each block of 64 elements, and a sparse Q:

        m_r = decay m_r + g_r;   q_r = Q(C m_r);   m_r -= C^-1 q_r;   gradient = sign(C^-1 mean over ranks of q_r)

    Each weight moves by the learning rate, up or down, whatever the size of its gradient. So use plain SGD without
    momentum, with a learning rate such as Adam would have; weight decay is the optimizer's, and decoupled, since it
    stays out of the sign: `torch.optim.SGD` adds it times the learning rate. A weight whose mean is exactly zero stays
    where it is. A NaN or an infinity of one rank makes its block NaN on all ranks, and sets this rank's momentum
    there to zero. A gradient scaler is refused: it would divide the steps by the loss scale. bf16 needs none.

    Call backward once per step, and use `bagua.no_sync` for all passes but the last: a second one would add gradients
    to signs, which raises an error. A pass whose gradients are zeroed has gone into the momenta all the same.

    Args:
        decay: of the momentum, 0 <= decay < 1.
        chunk: elements of a block, 2 to 1024.
        keep: frequencies of a block that are sent, 1 to `chunk`.
        codec: Q, a lossy codec that cannot be summed. None (default): the `keep` largest of each block in 2 bits,
            `PackedTopK(keep / chunk, chunk)`. For full precision as in the paper pass `TopK(keep / chunk, chunk)`.

    State: the momentum, one element for each gradient.
    Bytes: R-1 encoded tensors per rank; with the defaults 1.375 bits for each element and other rank.
    Source: arXiv:2411.19870 (DeMo), algorithm 1 and its signed update, with the transform of the type DCT-II.
    Differs: blocks are 64 neighbours of a bucket; the paper transforms each parameter in as many dimensions as it has,
        in blocks of 64 in each. Values have 2 bits by default. The inverse is taken in fp64, and what is smaller than
        2^-40 of the largest in its block counts as zero, so that ranks with other processors find the same signs.
        With a single rank everything is sent.

    Examples:
        >>> import bagua.contrib
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        >>> model = bagua.distribute(model, optimizer, bagua.contrib.DeMo())
    """

    name: ClassVar[str] = "demo"
    summary: ClassVar[str] = "signs of the largest frequencies of each rank's own momentum, 2 bits each"
    exactness: ClassVar[Exactness] = Exactness.LOSSY
    scales_with_loss: ClassVar[bool] = False

    decay: float = 0.999
    chunk: int = 64
    keep: int = 8
    codec: str | Codec | None = None

    def __post_init__(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float) or not 0 <= self.decay < 1:
            raise ValueError(f"decay: expected a number with 0 <= decay < 1, got {self.decay!r}")
        if isinstance(self.chunk, bool) or not isinstance(self.chunk, int) or not 2 <= self.chunk <= 1024:
            raise ValueError(f"chunk: expected a whole number from 2 to 1024, got {self.chunk!r}")
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or not 1 <= self.keep <= self.chunk:
            raise ValueError(f"keep: expected a whole number from 1 to chunk={self.chunk}, got {self.keep!r}")
        if self._codec.linear or self._codec.lossless:
            raise ValueError(f"codec {self._codec.name!r} keeps all of the momentum; use a sparse one")

    @property
    def _codec(self) -> Codec:
        return PackedTopK(self.keep / self.chunk, self.chunk) if self.codec is None else codecs.get(self.codec)

    @cached_property
    def exchange(self) -> Exchange:
        """The mean of all ranks' frequencies."""
        return AllGather(self._codec)

    def setup(self, ctx: Context) -> None:
        """Zero momenta."""
        ctx.prepare(self.exchange)
        for bucket in ctx.buckets:
            ctx.tensor("momentum", bucket)

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        """Launch at once."""
        x, m, alone = bucket.flat, ctx.tensor("momentum", bucket), ctx.groups.world.size == 1

        def take() -> None:
            m.mul_(self.decay).add_(x)
            x.copy_(_transform(m, self.chunk, back=False))
            sent = x if alone or not x.numel() else self._as_sent(x)
            m.sub_(_transform(sent, self.chunk, back=True)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

        ctx.launch(self.exchange, bucket, before=take, after=lambda: x.copy_(_signs(x, self.chunk)))

    def on_backward_end(self, ctx: Context) -> None:
        """The optimizer needs the signs."""
        ctx.wait()

    def _as_sent(self, x_N: Tensor) -> Tensor:
        """What the other ranks decode."""
        codec = self._codec
        return codec.decode(codec.encode(x_N[None]), x_N.numel(), dtype=x_N.dtype)[0]


@lru_cache(maxsize=16)
def _basis(size: int, device: torch.device) -> Tensor:
    """[size, size] fp64: row k is the frequency k of the orthonormal DCT-II."""
    numbers = torch.arange(size, dtype=torch.float64, device="cpu")
    at = (numbers + 0.5) * math.pi / size
    rows = torch.cos(numbers[:, None] * at) * math.sqrt(2 / size)
    rows[0] *= math.sqrt(0.5)
    return rows.to(device)


def _transform(x_N: Tensor, chunk: int, back: bool) -> Tensor:
    """[N] fp64: each block, the shorter last one too, by its frequencies or, if `back`, by its elements."""
    whole, parts = x_N.numel() // chunk * chunk, []
    for part in (x_N[:whole].view(-1, chunk), x_N[whole:].view(1, -1)):
        if part.numel():
            basis = _basis(part.shape[1], part.device)
            parts.append((part.double() @ (basis if back else basis.T)).flatten())
    return torch.cat(parts) if parts else x_N.double()


def _signs(x_N: Tensor, chunk: int) -> Tensor:
    """Signs of the elements with the frequencies `x_N`; NaN in a block with one that is not finite."""
    y_N = _transform(x_N, chunk, back=True)
    whole, parts = x_N.numel() // chunk * chunk, []
    for y, x in ((y_N[:whole].view(-1, chunk), x_N[:whole].view(-1, chunk)), (y_N[whole:][None], x_N[whole:][None])):
        if y.numel():
            least = x.abs().amax(1, keepdim=True).double() * 2.0**-40
            signs = torch.where(y.abs() > least, y.sign(), 0.0)
            parts.append(torch.where(y.isfinite(), signs, torch.nan).flatten())
    return torch.cat(parts) if parts else y_N
