"""Whether all ranks form the means of a bucket themselves, in one latency, instead of an owner of each part, in two.

It takes R-1 times the payload instead of 2 (R-1)/R times, and changes no bit. So it pays where a step waits for
latencies and not for bytes: docs/design/0014-wide-area.md.
"""

from __future__ import annotations

from bagua.exchanges.base import Exchange

__all__ = ["LAST_SHARE", "MOST_OF_TWO", "gathers"]

LAST_SHARE = 0.25  # of the bandwidth-delay product: so much more may the last bucket alone send
MOST_OF_TWO = 4.0  # times the bandwidth-delay product: so much may two ranks send


def gathers(exchange: Exchange, numel: int, total: int, last: bool, size: int, bdp_bytes: float) -> bool:
    """Whether the exchange of one bucket does.

    Those of all buckets do if what they send more goes through the link in the latency that is saved: then the step
    ends no later even if all gradients are there at once. Else the last one does if that costs the others little. With
    two ranks it costs no bytes, but a sum is not formed while it comes, so large ones do not.

    Args:
        numel: elements of the bucket.
        total: of all buckets of the step.
        last: it is the last bucket.
        size: ranks that exchange, R.
        bdp_bytes: what a link holds in one latency, its bandwidth-delay product one way; 0: ranks are near.
    """
    if size < 2 or not numel or bdp_bytes <= 0:
        return False
    if size == 2:
        return exchange.bytes_per_rank(numel, size) <= MOST_OF_TWO * bdp_bytes
    more = exchange.bytes_per_rank(numel, size) * (size / 2 - 1)
    return more * total / numel <= exchange.num_means * bdp_bytes or (last and more <= LAST_SHARE * bdp_bytes)
