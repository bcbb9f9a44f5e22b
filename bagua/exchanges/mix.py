"""`mix`: composes an exchange from topology, codec, hierarchy and error feedback.

| | identity | linear codec | other codec |
|---|---|---|---|
| complete | AllReduce | AllReduce on the cast | ScatterGather |
| fixed sparse | Gossip | Gossip | DifferenceGossip |
| changing sparse | Gossip | Gossip | error: replicas need fixed peers |
"""

from __future__ import annotations

from bagua import codecs, topologies
from bagua.codecs import Codec
from bagua.exchanges.all_reduce import AllReduce
from bagua.exchanges.base import Exchange
from bagua.exchanges.difference_gossip import DifferenceGossip
from bagua.exchanges.gossip import Gossip
from bagua.exchanges.hierarchical import Hierarchical
from bagua.exchanges.scatter_gather import ScatterGather
from bagua.topologies import Topology

__all__ = ["get_gather_codec", "mix"]


def get_gather_codec(codec: str | Codec | None) -> Codec | None:
    """Return the codec of that name, or None.

    Raises:
        TypeError, ValueError: as `bagua.codecs.get`; the message names the option.
    """
    try:
        return None if codec is None else codecs.get(codec)
    except (TypeError, ValueError) as error:
        raise type(error)(f"gather_codec: {error}") from None


def mix(
    topology: str | Topology = "complete",
    codec: str | Codec = "identity",
    *,
    hierarchical: bool = False,
    error_feedback: bool = False,
    average: bool = True,
    running_scale: bool = False,
    gather_codec: str | Codec | None = None,
) -> Exchange:
    """Return the exchange that averages over `topology` with `codec` on the wire.

    Args:
        topology: a registered name or an instance.
        codec: a registered name or an instance.
        hierarchical: exact within a node, the rest between nodes.
        error_feedback: add the compression error of one step to the next (complete topology, lossy codec).
        average: mean if true, else sum (complete topology only).
        running_scale: divide each element by the root of its running mean magnitude before it is encoded (complete
            topology, a codec that is lossy and not linear); see `ScatterGather`.
        gather_codec: codec of the all-gather phase, which sends the means to more than two ranks (as for
            `running_scale`). None: `codec`.

    Raises:
        ValueError: a name is unknown, or two parts cannot be combined; names both.

    Examples:
        >>> bagua.exchanges.mix("complete", "int4", error_feedback=True)
        ScatterGather(codec=Int4(block=128), error_feedback=True, average=True, running_scale=False)
    """
    topology, codec = topologies.get(topology), codecs.get(codec)
    gather_codec = get_gather_codec(gather_codec)
    if gather_codec is not None and (codec.linear or not topology.complete):
        other = f"codec {codec.name!r}, which is summed on the wire" if codec.linear else f"topology {topology.name!r}"
        raise ValueError(f"gather_codec={gather_codec.name!r} cannot be combined with {other}: there is one codec")
    if error_feedback and (codec.linear or not topology.complete):
        other = f"codec {codec.name!r}" if codec.linear else f"topology {topology.name!r}"
        reason = (
            "it is summed on the wire, so there is no encoded value to compare with"
            if codec.linear
            else "the replicas of a sparse topology already remember what was lost"
        )
        raise ValueError(f"error_feedback=True cannot be combined with {other}: {reason}")
    if running_scale and (codec.linear or not topology.complete):
        other = f"codec {codec.name!r}, which loses too little" if codec.linear else f"topology {topology.name!r}"
        raise ValueError(f"running_scale=True cannot be combined with {other}")
    if not average and not topology.complete:
        raise ValueError(f"average=False cannot be combined with topology {topology.name!r}: gossip has no sum")
    exchange: Exchange
    if topology.complete:
        if codec.linear:
            exchange = AllReduce(codec, average)
        else:
            exchange = ScatterGather(codec, error_feedback, average, running_scale, gather_codec)
    elif codec.linear:
        exchange = Gossip(topology, codec)
    else:
        exchange = DifferenceGossip(topology, codec)
    return Hierarchical(exchange) if hierarchical else exchange
