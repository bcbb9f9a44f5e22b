"""ByteGrad: gradients averaged in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.base import Algorithm, Exactness
from bagua.algorithms.gradient_allreduce import GradientAllReduce
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.registry import register
from bagua.codecs import Codec

__all__ = ["ByteGrad"]


@register
@dataclass(frozen=True, repr=False)
class ByteGrad(GradientAllReduce):
    """Every rank steps with the same 8-bit approximation of the mean gradient.

    Each rank quantises its gradient; rank r averages chunk r of all ranks and quantises the mean. Both times the
    error of an element is at most 0.51/255 of the range (max - min) of its block. The same recipe as
    `GradientAllReduce` with another codec and another default for nodes.

    Args:
        hierarchical: full precision within a node, 8 bit between nodes. None (default) does so where it has an
            effect, that is with several nodes of which one has several ranks, and compresses between all ranks
            elsewhere. Between sites (BAGUA_SITE) a start-up benchmark decides.
        average: mean if true, else sum; see `GradientAllReduce` for several backward passes.
        codec: the codec on the wire, "minmax_uint8" with blocks of 1024 elements by default.
        error_feedback: add the compression error of one step to the next; at most 8 bytes of state per element. None
            (default) does so for codecs with less than 8 bits per element that are biased, as all but "eden" are,
            for "top_k", and for "eden" if all optimizers given to `distribute` are `torch.optim.SGD`.
        running_scale: divide each element by the root of its running mean magnitude before it is encoded; 4 bytes of
            state per element. None (default) does so for "eden" without error feedback.
        denoise_second_moment: take the expected square of the codec's noise out of the second moments of
            `torch.optim.Adam` or `AdamW`; "eden" without error feedback only; 4 bytes of state per element. None
            (default): there, without amsgrad and with weights of at least 32 bits; a notice says so.
        gather_codec: codec of the all-gather phase, which sends the means, with more than two ranks; None (default):
            `codec`. See `GradientAllReduce`.

    Bytes: about 2 (R-1)/R bytes per element sent, a quarter of an all-reduce in fp32.
    Source: Bagua 0.9's ByteGrad (its documentation; arXiv:2107.01499 section 3).
    Differs: blocks of 1024 instead of one range for a whole chunk, so a few large gradients do not blur the
        rest; a single node compresses too unless told otherwise.

    Examples:
        >>> algorithm = bagua.algorithms.ByteGrad(hierarchical=False)
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "bytegrad"
    summary: ClassVar[str] = "gradients averaged in 8 bits"
    exactness: ClassVar[Exactness] = Exactness.LOSSY

    codec: str | Codec = "minmax_uint8"

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Hierarchical by default where there is a hierarchy."""
        return fit_hierarchy(self, nodes, default=True)
